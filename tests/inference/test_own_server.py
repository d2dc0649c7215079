"""What is changed for TRL's own vLLM server: where both ends meet, and how its engine is asked for its weights.

Classes of vLLM and a session of ``requests`` are made up. The real ones are tested by ``suites/vllm``.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat.inference import control, engine_weights
from pytest_trlcompat.inference.gloo_transfer import _MeetingSession, adapt_extension, adapt_trainer

TOKEN = "0123456789abcdef" * 2


class Session:
    headers = "those of the session"

    def __init__(self) -> None:
        self.posted: list[tuple[str, Any, dict[str, Any]]] = []

    def post(self, url: str, json: Any = None, **options: Any) -> str:
        self.posted.append((url, json, options))
        return "answer"


def test_the_server_is_told_where_to_meet_in_the_place_of_all_addresses() -> None:
    session = Session()
    meeting = _MeetingSession(session, TOKEN)
    asked = {"host": "0.0.0.0", "port": 51216, "world_size": 2}
    assert meeting.post("http://x/init_communicator/", json=asked) == "answer"
    meeting.post("http://x/reset_prefix_cache/")
    meeting.post("http://x/generate/", json={"prompts": ["host"]}, timeout=3)
    assert meeting.headers == "those of the session"
    assert asked["host"] == "0.0.0.0"
    assert session.posted == [
        ("http://x/init_communicator/", {"host": TOKEN, "port": 51216, "world_size": 2}, {}),
        ("http://x/reset_prefix_cache/", None, {}),
        ("http://x/generate/", {"prompts": ["host"]}, {"timeout": 3}),
    ]


def engine() -> tuple[Any, list[tuple[Any, ...]]]:
    """An engine as TRL's own server calls it, and what its workers were called with."""
    called: list[tuple[Any, ...]] = []

    class Worker:
        pass

    class LLM:
        def collective_rpc(self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None) -> str:
            called.append((method, timeout, args, kwargs))
            return "done"

    engine_weights.offer(Worker, LLM)
    assert getattr(Worker, engine_weights.METHOD) is engine_weights.send
    return LLM(), called


def test_a_weight_of_that_name_asks_for_the_engines_weights() -> None:
    llm, called = engine()
    name = f"{engine_weights.METHOD}:{TOKEN}"
    assert llm.collective_rpc(method="update_named_param", args=(name, "dtype", (0,))) == "done"
    assert called == [(engine_weights.METHOD, None, (TOKEN,), None)]


@pytest.mark.parametrize("name", ["{folder}/weights.safetensors", "../weights", "0" * 31])
def test_a_request_names_no_file_to_which_weights_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    (tmp_path / "control").mkdir(mode=0o700)
    monkeypatch.setenv(control.CONTROL, str(tmp_path / "control"))
    parameters = {"weight": SimpleNamespace(detach=lambda: pytest.fail("the weights were read"))}
    model = SimpleNamespace(named_parameters=parameters.items)
    worker = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1), model_runner=SimpleNamespace(model=model))
    with pytest.raises(control.ControlError, match="is no token"):
        engine_weights.send(worker, name.format(folder=tmp_path))
    assert [path.name for path in tmp_path.rglob("*")] == ["control"]


def test_a_worker_with_a_part_of_the_weights_sends_nothing() -> None:
    worker = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2))
    with pytest.raises(ValueError, match="each of 2 workers has a part"):
        engine_weights.send(worker, TOKEN)


def test_every_other_call_is_as_it_was() -> None:
    llm, called = engine()
    weight = ("model.norm.weight", "dtype", (2,))
    llm.collective_rpc(method="update_named_param", args=weight)
    llm.collective_rpc("init_communicator", 3.0, ("0.0.0.0", 1), kwargs={"world_size": 2})
    llm.collective_rpc(method="close_communicator")
    assert called == [
        ("update_named_param", None, weight, None),
        ("init_communicator", 3.0, ("0.0.0.0", 1), {"world_size": 2}),
        ("close_communicator", None, (), None),
    ]


TRAINER = """
import types
torch = types.SimpleNamespace(cuda=None, name="torch")
class VLLMClient: pass
class Trainer:
    def __init__(self):
        self.device = {asked}
"""


def trainer_module(asked: str) -> ModuleType:
    module = ModuleType("made_up_trainer")
    exec(TRAINER.format(asked=asked), vars(module))
    return module


def test_a_trainer_that_asks_cuda_for_its_device_is_told_one() -> None:
    module = trainer_module("torch.cuda.current_device()")
    adapt_trainer(module)
    assert module.Trainer().device == 0


def test_a_trainer_that_does_not_ask_stays_as_it_is() -> None:
    later, without = trainer_module("torch.name"), trainer_module("torch.cuda.current_device()")
    del without.VLLMClient
    for module in (later, without):
        before = module.torch
        adapt_trainer(module)
        assert module.torch is before


def test_a_server_has_another_device_than_its_trainer() -> None:
    trainer, server = trainer_module("torch.cuda.current_device()"), trainer_module("None")
    adapt_trainer(trainer)
    adapt_extension(server)
    uuids = {module.torch.cuda.get_device_properties(0).uuid for module in (trainer, server)}
    assert len(uuids) == 2
    without = ModuleType("imports torch in functions")
    adapt_extension(without)
    assert not hasattr(without, "torch")
