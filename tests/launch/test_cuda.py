"""``launch`` on machines with a GPU, as far as it can be tested without one; see also ``tests/stack/test_gpu.py``."""

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


def test_queries_about_a_gpu_are_answered_by_another_process() -> None:
    active = [True]
    number = cuda._in_another_process(os.getpid, active)
    first = number()
    assert first != os.getpid()
    assert number() == first, "queried once"
    active.clear()
    assert number() == os.getpid()


def test_an_object_comes_with_its_plain_attributes() -> None:
    made = SimpleNamespace(name="H100", major=9, total_memory=85 * 10**9, uuid=object(), _hidden=1)
    assert cuda._in_child(lambda index: made, 0) == SimpleNamespace(name="H100", major=9, total_memory=85 * 10**9)


def test_that_process_answers_its_own_queries() -> None:
    """CUDA queries the capability of every GPU when it starts, by the same functions."""
    active = [True]

    def inner() -> int:
        return os.getpid()

    wrapped = cuda._in_another_process(inner, active)
    outer = cuda._in_another_process(lambda: f"{os.getpid()} {wrapped()}", active)
    outside, inside = outer().split()
    assert outside == inside != str(os.getpid())


def test_an_error_in_that_process_is_raised_here() -> None:
    def no_driver() -> Any:
        raise AssertionError("Torch not compiled with CUDA enabled")

    with pytest.raises(RuntimeError, match="^AssertionError: Torch not compiled with CUDA enabled$"):
        cuda._in_child(no_driver)
    with pytest.raises(RuntimeError, match="^the process that queried CUDA died$"):
        cuda._in_child(lambda: os._exit(9))


def test_initialized_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.check_uninitialized("importing json")
    monkeypatch.setattr(cuda, "cuda_initialized", lambda: True)
    with pytest.raises(cuda.CudaInitialized, match="^importing json has initialised CUDA.*mode='cold'"):
        cuda.check_uninitialized("importing json")


@pytest.mark.parametrize("before", [None, "0"])
def test_the_variable_of_torch_is_as_before(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    monkeypatch.delenv(cuda._NVML_CHECK, raising=False)
    if before is not None:
        monkeypatch.setenv(cuda._NVML_CHECK, before)
    during = None
    with pytest.raises(ZeroDivisionError), cuda.without_initialization():
        raise ZeroDivisionError
    with cuda.without_initialization():
        during = os.environ[cuda._NVML_CHECK]
    assert during == "1"
    assert os.environ.get(cuda._NVML_CHECK) == before


@pytest.mark.parametrize(
    ("variable", "number"), [("0,1", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("NoDevFiles", 0), ("GPU-a, GPU-b", 2)]
)
def test_cuda_sees_the_devices_in_front_of_the_first_that_is_none(variable: str, number: int) -> None:
    """https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars"""
    assert _devices.visible_gpus({"CUDA_VISIBLE_DEVICES": variable}) == number


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
