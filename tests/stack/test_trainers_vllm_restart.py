"""The cure of ``grpo-vllm-server-loss`` between ranks: TRL's own ``VLLMGeneration.generate``, and a stand-in client.

With a real server it is tested by ``suites/vllm``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.launch import Launcher

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

TRAINERS = ("GRPO", "RLOO", "Distillation")


def generated(wrong: str) -> dict[str, Any]:
    """Ask twice for completions, in each rank: which it got, what it failed with, and how often its client was asked.

    Args:
        wrong: the server is another one at the second answer (``restarted``), does not say who it is then (``silent``),
            or from the start (``unknown``).
    """
    from types import SimpleNamespace

    from accelerate import Accelerator
    from trl.generation.vllm_generation import VLLMGeneration

    from pytest_trlcompat.trainers.curing import conditions
    from pytest_trlcompat.trainers.vllm.vllm_restart import VLLMRestartMixin

    conditions.installed = lambda package: True  # vLLM, which a server of its own has alone
    config = {"instance_id": "" if wrong == "unknown" else "11", "parallel_config": {"_api_process_count": 1}}
    answers: list[list[list[int]]] = []

    class Client:
        base_url = "http://server:8000"

        def __init__(self) -> None:
            said = SimpleNamespace(status_code=200, json=lambda: {"vllm_config": config})
            self.session = SimpleNamespace(get=lambda *_, **__: said)

        def generate(self, prompts: list[list[int]], n: int, **_: Any) -> dict[str, Any]:
            answers.append(prompts)
            if len(answers) == 2 and wrong:
                config["instance_id"] = {"restarted": "12", "silent": ""}[wrong]
            completions = [[*ids, number] for ids in prompts for number in range(n)]
            return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": None}

        def chat(self, **_: Any) -> None:
            raise AssertionError("prompts are tokens")

    class Trainer:
        def __init__(self) -> None:
            self.accelerator = Accelerator()
            self.vllm_generation = VLLMGeneration.__new__(VLLMGeneration)
            settings: dict[str, Any] = dict.fromkeys(
                (
                    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length"),
                    *("logprobs", "structured_outputs_regex", "generation_kwargs"),
                )
            )
            vars(self.vllm_generation).update(settings, mode="server", accelerator=self.accelerator)
            if self.accelerator.is_main_process:
                self.vllm_generation.vllm_client = Client()

    class Corrected(VLLMRestartMixin, Trainer):
        pass

    got: list[Any] = []
    failure = None
    try:
        trainer: Any = Corrected()
        rank = trainer.accelerator.process_index
        for _ in range(2):
            got.append(trainer.vllm_generation.generate([[rank], [rank]], None, 2)[1])
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    return {"got": got, "failure": failure, "asked": len(answers)}


def of_ranks(wrong: str, launcher: Launcher) -> list[dict[str, Any]]:
    from pytest_trlcompat import stack

    if not stack.satisfied({"trl": ">=1.11"}, stack.installed()):
        pytest.skip("the server of this release is TRL's own, which does not say who it is")
    result = launcher(generated, wrong, strategy="ddp", world_size=2, sharded=False, device="cpu", timeout=60)
    return list(result.values)


def test_completions_of_one_server_reach_every_rank(launcher: Launcher) -> None:
    found = of_ranks("", launcher)
    assert [each["failure"] for each in found] == [None, None]
    assert [each["got"] for each in found] == [[[[0, 0], [0, 1]]] * 2, [[[1, 0], [1, 1]]] * 2]
    assert [each["asked"] for each in found] == [2, 0]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [("restarted", "another one has answered (instance 12)"), ("silent", "its instance_id is ''")],
)
def test_every_rank_refuses_what_another_server_has_answered(wrong: str, said: str, launcher: Launcher) -> None:
    found = of_ranks(wrong, launcher)
    assert [len(each["got"]) for each in found] == [1, 1]
    first, second = (each["failure"] for each in found)
    assert first.startswith("CureError: VLLMRestartMixin with trl ")
    assert second.startswith("CureError: VLLMRestartMixin: looked for completions that come from the main process")
    assert said in first
    assert said in second


def test_every_rank_ends_where_the_server_does_not_say_who_it_is(launcher: Launcher) -> None:
    found = of_ranks("unknown", launcher)
    assert [each["got"] for each in found] == [[], []]
    assert all(each["failure"].startswith("CureError: ") for each in found)
    assert all("its instance_id is ''" in each["failure"] for each in found)


def trained(name: str, subject: str, tiny: TinyModel) -> dict[str, Any]:
    """Train three steps with a server that is another one from its second answer on: the steps done, and the failure.

    The trainer and its ``VLLMGeneration`` are TRL's; the client and the handing over of weights are not.

    Args:
        name: one of :data:`TRAINERS`.
    """
    import importlib
    from types import SimpleNamespace

    from trl.generation.vllm_generation import VLLMGeneration

    from pytest_trlcompat.trainers.curing import conditions
    from suites.in_rank import distillation, grpo

    conditions.installed = lambda package: True  # vLLM, which a server of its own has alone
    module: Any = importlib.import_module(f"trl.trainer.{name.lower()}_trainer")
    module.is_vllm_available = lambda *_, **__: True
    config = {"instance_id": "11", "parallel_config": {"_api_process_count": 1}}
    answers: list[int] = []

    class Client:
        base_url = "http://server:8000"
        session = SimpleNamespace(
            get=lambda *_, **__: SimpleNamespace(status_code=200, json=lambda: {"vllm_config": config})
        )

        def generate(self, prompts: list[list[int]], n: int, **_: Any) -> dict[str, Any]:
            answers.append(len(prompts))
            if len(answers) == 2:
                config["instance_id"] = "12"
            completions = [[5 + number, 9, 7] for _ in prompts for number in range(n)]
            each = [[[value] for value in row] for row in completions]
            logprobs = [[[-1.0] for _ in row] for row in completions]
            return {
                "prompt_ids": prompts,
                "completion_ids": completions,
                "logprobs": logprobs,
                "logprob_token_ids": each,
            }

        def get_server_info(self) -> dict[str, Any]:
            return {"model_config": {"logprobs_mode": "processed_logprobs"}}

        def chat(self, **_: Any) -> None:
            raise AssertionError("prompts are tokens")

    def begin(self: Any) -> None:
        if self.accelerator.is_main_process:
            self.vllm_client = Client()

    VLLMGeneration._init_vllm = begin
    VLLMGeneration.sync_weights = lambda self: None
    arguments = {"teacher_model": distillation.load_teacher(tiny)} if name == "Distillation" else {}
    failure = None
    trainer = grpo.build_trainer(
        subject, tiny, name=name, arguments=arguments, use_vllm=True, vllm_mode="server", beta=0.0
    )
    try:
        trainer.train()
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    return {"steps": trainer.state.global_step, "failure": failure, "asked": len(answers)}


@pytest.mark.parametrize("name", TRAINERS)
def test_each_trainer_that_generates_with_a_server_ends_in_every_rank(
    name: str, tiny_qwen2: Callable[..., TinyModel], launcher: Launcher
) -> None:
    first, second = trainings(name, "corrected", tiny_qwen2(), launcher)
    assert (first["steps"], second["steps"], first["asked"], second["asked"]) == (1, 1, 2, 0)
    assert first["failure"].startswith("CureError: VLLMRestartMixin with trl ")
    assert "another one has answered (instance 12)" in first["failure"]
    assert second["failure"].startswith("CureError: VLLMRestartMixin: looked for completions that come from the main")


@pytest.mark.parametrize("name", TRAINERS)
def test_trls_own_goes_on_to_the_end(name: str, tiny_qwen2: Callable[..., TinyModel], launcher: Launcher) -> None:
    found = trainings(name, "upstream", tiny_qwen2(), launcher)
    assert [(each["steps"], each["failure"], each["asked"]) for each in found] == [(3, None, 3), (3, None, 0)]


def trainings(name: str, subject: str, tiny: TinyModel, launcher: Launcher) -> list[dict[str, Any]]:
    from pytest_trlcompat import stack

    if not stack.satisfied({"trl": ">=1.11"}, stack.installed()):
        pytest.skip("the server of this release is TRL's own, which does not say who it is")
    arguments: dict[str, Any] = {"strategy": "ddp", "world_size": 2, "sharded": False, "timeout": 120}
    return list(launcher(trained, name, subject, tiny, **arguments).values)
