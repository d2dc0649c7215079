"""The room ``launch`` beside a GPU: what can be held without one. What needs one is in ``tests/stack/test_gpu.py``."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat import _devices
from pytest_trlcompat.launch import cuda
from pytest_trlcompat.launch.cluster import Cluster
from pytest_trlcompat.launch.environment import base_environment
from pytest_trlcompat.launch.proof import expectation
from pytest_trlcompat.launch.strategy import strategy


def test_a_process_without_the_driver_has_not_initialised_cuda() -> None:
    assert not _devices.cuda_initialized("libno-such-driver.so.1")


def test_questions_about_a_gpu_are_answered_by_another_process() -> None:
    still = [True]
    number = cuda._asked_elsewhere(os.getpid, still)
    first = number()
    assert first != os.getpid()
    assert number() == first, "asked once"
    still.clear()
    assert number() == os.getpid()


def test_an_object_comes_with_its_plain_attributes() -> None:
    made = SimpleNamespace(name="H100", major=9, total_memory=85 * 10**9, uuid=object(), _hidden=1)
    assert cuda._in_child(lambda index: made, 0) == SimpleNamespace(name="H100", major=9, total_memory=85 * 10**9)


def test_what_that_process_asks_in_turn_it_answers_itself() -> None:
    """The start of CUDA asks for the capability of every GPU, by the same functions."""
    still = [True]

    def inner() -> int:
        return os.getpid()

    wrapped = cuda._asked_elsewhere(inner, still)
    outer = cuda._asked_elsewhere(lambda: f"{os.getpid()} {wrapped()}", still)
    asking, asked = outer().split()
    assert asking == asked != str(os.getpid())


def test_an_error_there_is_one_here() -> None:
    def no_driver() -> Any:
        raise AssertionError("Torch not compiled with CUDA enabled")

    with pytest.raises(RuntimeError, match="^AssertionError: Torch not compiled with CUDA enabled$"):
        cuda._in_child(no_driver)
    with pytest.raises(RuntimeError, match="^the process that asked CUDA died$"):
        cuda._in_child(lambda: os._exit(9))


def test_cuda_that_was_touched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.check_left_alone("importing json")
    monkeypatch.setattr(cuda, "cuda_initialized", lambda: True)
    with pytest.raises(cuda.CudaInitialized, match="^importing json has initialised CUDA.*mode='cold'"):
        cuda.check_left_alone("importing json")


@pytest.mark.parametrize("before", [None, "0"])
def test_the_variable_of_torch_is_as_before(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    monkeypatch.delenv(cuda._NVML_CHECK, raising=False)
    if before is not None:
        monkeypatch.setenv(cuda._NVML_CHECK, before)
    during = None
    with pytest.raises(ZeroDivisionError), cuda.left_alone():
        raise ZeroDivisionError
    with cuda.left_alone():
        during = os.environ[cuda._NVML_CHECK]
    assert during == "1"
    assert os.environ.get(cuda._NVML_CHECK) == before


@pytest.mark.parametrize(("device", "visible"), [("software", ""), ("cuda", "0,1"), ("cpu", "0,1")])
def test_the_software_accelerator_is_alone_beside_gpus(
    monkeypatch: pytest.MonkeyPatch, device: str, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert base_environment(device, Cluster())["CUDA_VISIBLE_DEVICES"] == visible


def test_without_a_gpu_none_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("pytest_trlcompat.launch.environment.visible_gpus", lambda: 0)
    assert "CUDA_VISIBLE_DEVICES" not in base_environment("software", Cluster())


@pytest.mark.parametrize(
    ("name", "world_size", "engine"),
    [("ddp", 1, None), ("ddp", 2, "ddp"), ("zero3", 1, "deepspeed"), ("fsdp2", 1, "fsdp2"), ("single", 1, None)],
)
def test_the_engine_that_a_rank_must_have_built(name: str, world_size: int, engine: str | None) -> None:
    """Accelerate wraps no model in DDP where there is one process."""
    assert expectation(strategy(name), world_size, "cuda", sharded=True).engine == engine
