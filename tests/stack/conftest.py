"""What the tests with the stack share: one warm server on the software accelerator, whatever else the machine has."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeAlias

import pytest

from pytest_trlcompat.launch import Launcher

from .listened_launches import ListenedLaunch, launch_and_listen

NEWEST_ALONE = (
    *("test_accelerator_*", "test_artefacts", "test_command*", "test_debugging", "test_docs_examples"),
    *("test_downstream", "test_import_variables", "test_launch_cluster", "test_launch_cpu", "test_launch_faults"),
    *("test_launch_machine", "test_launch_ports", "test_new_family"),
    *("test_preloading", "test_reference_*"),
)
"""Files of which ``nox -s tests`` runs none with an older stack: what they test, this package's launcher, accelerator
and reference, depends least on the releases of a stack, and they take two fifths of the time."""


STAYS = ("TRLCOMPAT_", "PYTORCH_NVML_BASED_CUDA_CHECK", "PYTEST_CURRENT_TEST")
"""How names of variables begin that are set during a test for the whole process: this project's own, by which ranks of
later tests find a vLLM server that the session shares; what the import of DeepSpeed sets, since a module is imported
once; and pytest's."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "newest_stack: left out of the older stack by `nox -s tests`")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_of_these = item.path.parent == Path(__file__).parent
        if is_of_these and any(fnmatch(item.path.stem, pattern) for pattern in NEWEST_ALONE):
            item.add_marker("newest_stack")


@pytest.fixture(scope="session")
def launch() -> Iterator[Launcher]:
    """Launches on the software accelerator, also where there is a GPU."""
    with Launcher(device="software") as launcher:
        yield launcher


ColdStep: TypeAlias = "Callable[[str, str], ListenedLaunch]"
"""Gives the cold launch of a training step under a strategy by a command."""


@pytest.fixture(scope="session")
def cold_step(launcher: Launcher) -> ColdStep:
    """Cold launches of a training step. Each is made once for the tests of all files, since all its processes import
    the stack."""

    @functools.cache
    def launch(strategy: str, command: str) -> ListenedLaunch:
        return launch_and_listen(launcher, strategy, mode="cold", command=command)

    return launch


@pytest.fixture(autouse=True)
def variables_are_restored() -> Iterator[None]:
    """A config that a test makes in its own process sets variables, such as ``ACCELERATE_USE_IPEX`` (Transformers 4).

    Every later launch would inherit them. Fixtures of a wider scope are set up before this one, so theirs stay.
    """
    before = dict(os.environ)
    yield
    for name in before.keys() | os.environ.keys():
        if name.startswith(STAYS):
            continue
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]


@pytest.fixture(autouse=True)
def no_data_loader_is_left() -> Iterator[None]:
    """A training that is left amidst its batches leaves its data loader in what all of Accelerate's objects share."""
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import GradientState

        GradientState().dataloader_references = [None]
