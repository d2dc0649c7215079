"""A launcher without the stack."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pytest_trlcompat.launch import Launcher


@pytest.fixture(scope="module")
def launch() -> Iterator[Launcher]:
    with Launcher(device="cpu", timeout=20) as launcher:
        yield launcher
