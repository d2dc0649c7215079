"""What the tests with the stack share: one warm server on the software accelerator, whatever else the machine has."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from pytest_trlcompat.launch import Launcher


@pytest.fixture(scope="session")
def launch() -> Iterator[Launcher]:
    """Launches on the software accelerator, also where there is a GPU."""
    with Launcher(device="software") as launcher:
        yield launcher


@pytest.fixture(autouse=True)
def no_data_loader_is_left() -> Iterator[None]:
    """A training that is left amidst its batches leaves its data loader in what all of Accelerate's objects share."""
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import GradientState

        GradientState().dataloader_references = [None]
