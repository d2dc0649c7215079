"""What ranks are told about vLLM, and that its hook changes nothing anywhere else."""

from __future__ import annotations

import sys

import pytest

from pytest_trlcompat import stack
from pytest_trlcompat.inference import cpu_engine
from pytest_trlcompat.inference.environment import ON_CPU, engine_environment
from pytest_trlcompat.launch.cluster import Cluster
from pytest_trlcompat.launch.environment import base_environment

WITH_VLLM = {"trl": "1.16.0", "vllm": "0.31.0"}
SILENT = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@pytest.mark.parametrize("device", ["software", "cpu", "cuda"])
def test_without_vllm_nothing_is_said(device: str) -> None:
    assert engine_environment(device, {"trl": "1.16.0"}) == {}


@pytest.mark.parametrize("device", ["software", "cpu"])
def test_beside_these_devices_the_engine_runs_on_the_cpu_in_the_ranks_own_process(device: str) -> None:
    found = engine_environment(device, WITH_VLLM)
    assert found.items() >= {**SILENT, ON_CPU: "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items()


def test_on_a_gpu_the_engine_is_vllms_own() -> None:
    assert engine_environment("cuda", WITH_VLLM) == SILENT


def test_what_the_caller_has_set_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "installed", lambda: WITH_VLLM)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    found = base_environment("software", Cluster())
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert found[ON_CPU] == "1"


def test_outside_of_ranks_the_hook_does_not_even_import_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ON_CPU, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import would fail
    cpu_engine.install()
    assert cpu_engine.changes() == {"kept_layers": 0, "eager_engines": 0, "missing": [], "missing_experts": []}
