"""What the tests with the stack share: one warm server on the software accelerator, whatever else the machine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pytest_trlcompat.launch import Launcher


@pytest.fixture(scope="session")
def launch() -> Iterator[Launcher]:
    """Launches on the software accelerator, also where there is a GPU."""
    with Launcher(device="software") as launcher:
        yield launcher
