"""A vLLM server that was restarted is seen by what it says of itself; between ranks: ``tests/stack``;
with a real server: ``suites/vllm``."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat.trainers.curing.errors import CureError
from pytest_trlcompat.trainers.vllm import vllm_restart


class Client:
    """Stands for TRL's client of a vLLM server.

    Args:
        status: by which the server answers questions about itself.
        vllm_config: what it says.
    """

    base_url = "http://server:8000"

    def __init__(self, status: int = 200, **vllm_config: Any) -> None:
        self.vllm_config, self.status = vllm_config, status
        self.asked: list[str] = []
        self.session = SimpleNamespace(get=self._get)

    def generate(self, prompts: list[str], n: int = 1) -> list[str]:
        self.asked.append("generate")
        return prompts * n

    def chat(self, messages: list[str]) -> list[str]:
        return messages

    def _get(self, url: str, params: dict[str, str], timeout: float) -> Any:
        assert (url, params) == (f"{self.base_url}/server_info", {"config_format": "json"})
        self.asked.append("who")
        return SimpleNamespace(status_code=self.status, json=lambda: {"vllm_config": self.vllm_config})


def client(**changed: Any) -> Client:
    return Client(**{"instance_id": "11", "parallel_config": {"_api_process_count": 1}, **changed})


def watch(asked: Client) -> bool:
    """As for whoever asks the client by itself, without other ranks."""
    return vllm_restart._watch(asked, vllm_restart._Refusal())


def test_answers_of_one_server_are_passed_on() -> None:
    asked = client()
    assert watch(asked)
    assert asked.generate(["a"], n=2) == ["a", "a"]
    assert asked.chat(["b"]) == ["b"]
    # It is asked who it is behind each answer: what answers then is what has answered, or came after it.
    assert asked.asked == ["who", "generate", "who", "who"]


@pytest.mark.parametrize("method", ["generate", "chat"])
def test_an_answer_of_another_server_is_refused(method: str) -> None:
    asked = client()
    watch(asked)
    asked.vllm_config["instance_id"] = "12"
    with pytest.raises(CureError, match=r"\(instance 11\).*\(instance 12\).*last checkpoint"):
        getattr(asked, method)(["a"])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"instance_id": ""}, "its instance_id is ''"),
        ({"instance_id": None}, "its instance_id is None"),
        ({"parallel_config": None}, "its parallel_config is None"),
        ({"status": 404}, "/server_info is answered by 404"),
    ],
)
def test_a_server_that_does_not_say_who_it_is_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(CureError, match=said) as raised:
        watch(client(**changed))
    assert "without=['VLLMRestartMixin']" in str(raised.value)


def test_one_that_stops_saying_so_is_refused() -> None:
    asked = client()
    watch(asked)
    asked.status = 503
    with pytest.raises(CureError, match="/server_info is answered by 503"):
        asked.generate(["a"])


def test_of_several_processes_for_one_server_a_restart_is_not_looked_for(caplog: pytest.LogCaptureFixture) -> None:
    asked = client(parallel_config={"_api_process_count": 2})
    with caplog.at_level(logging.WARNING):
        assert not watch(asked)
    assert "2 processes answer for the vLLM server at http://server:8000" in caplog.text
    asked.vllm_config["instance_id"] = "12"
    assert asked.generate(["a"]) == ["a"]


@pytest.mark.parametrize(
    ("trl", "mode", "active"), [("1.11.0", "server", True), ("1.10.0", "server", False), ("1.16.0", "colocate", False)]
)
def test_it_acts_with_a_server_of_vllms_own_alone(
    trl: str, mode: str, active: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_trlcompat.trainers.curing.patching.installed_version", lambda package: trl)
    monkeypatch.setattr("pytest_trlcompat.trainers.curing.conditions.installed", lambda package: True)
    trainer = SimpleNamespace(vllm_generation=SimpleNamespace(mode=mode))
    found = vllm_restart.VLLMRestartMixin._activity(vllm_restart.VLLMRestartMixin, trainer)
    assert found.active is active


def built(is_main: bool, asked: Client, monkeypatch: pytest.MonkeyPatch, told: list[Any] | None = None) -> Any:
    """A trainer of a release whose server is vLLM's own.

    Args:
        told: what the main process tells other ranks; ``None``: what this one says.
    """
    monkeypatch.setattr("pytest_trlcompat.trainers.curing.patching.installed_version", lambda package: "1.16.0")
    monkeypatch.setattr("pytest_trlcompat.trainers.curing.conditions.installed", lambda package: True)
    monkeypatch.setattr("pytest_trlcompat.trainers.curing.cure.check_points", lambda *_: None)
    utils = ModuleType("accelerate.utils")
    utils.broadcast_object_list = lambda said: said if told is None else told  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "accelerate", ModuleType("accelerate"))
    monkeypatch.setitem(sys.modules, "accelerate.utils", utils)
    generation = SimpleNamespace(mode="server", generate=asked.generate)
    if is_main:
        generation.vllm_client = asked
        generation.generate = lambda *args: asked.generate(*args)

    class Trainer:
        def __init__(self) -> None:
            self.accelerator = SimpleNamespace(is_main_process=is_main)
            self.vllm_generation = generation

    return type("Corrected", (vllm_restart.VLLMRestartMixin, Trainer), {})()


@pytest.mark.parametrize("is_main", [True, False])
def test_the_main_process_alone_asks(is_main: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = client()
    built(is_main, asked, monkeypatch, told=None if is_main else [None, True])
    assert asked.asked == (["who"] if is_main else [])


def test_the_main_process_raises_what_it_has_seen_when_all_ranks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = client()
    trainer = built(True, asked, monkeypatch)
    assert trainer.vllm_generation.generate(["a"]) == ["a"]
    asked.vllm_config["instance_id"] = "12"
    with pytest.raises(CureError, match=r"\(instance 12\)"):
        trainer.vllm_generation.generate(["a"])


def test_other_ranks_raise_what_the_main_process_says(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = [None, True]
    trainer = built(False, client(), monkeypatch, told)
    assert trainer.vllm_generation.generate(["a"]) == ["a"]
    told[0] = "another one has answered"
    with pytest.raises(CureError, match=r"refused those of its vLLM server\. another one has answered"):
        trainer.vllm_generation.generate(["a"])


def test_other_ranks_are_not_asked_where_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = [None, False]
    trainer = built(False, client(), monkeypatch, told)
    told[0] = "another one has answered"
    assert trainer.vllm_generation.generate(["a"]) == ["a"]


@pytest.mark.parametrize("is_main", [True, False])
def test_every_rank_ends_where_the_server_does_not_say_who_it_is(
    is_main: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = None if is_main else ["its instance_id is ''", None]
    with pytest.raises(CureError, match="its instance_id is ''"):
        built(is_main, client(instance_id=""), monkeypatch, told)
