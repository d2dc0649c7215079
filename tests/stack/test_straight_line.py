"""A row of conformance goes through the files of the package in one direction: no file calls back into one above it."""

from __future__ import annotations

from pathlib import Path

import pytest

import pytest_trlcompat
from benchmarks.conformance_row import compared
from benchmarks.passes import calls_back
from pytest_trlcompat.training import begin

PACKAGE = Path(pytest_trlcompat.__file__).parent


@pytest.mark.parametrize("trainer", ["grpo", "sft"])
def test_nothing_that_a_row_calls_calls_back_up(trainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the plugin asks of trainings that tests build is the doctor's, and no part of a row: suites are left out.
    monkeypatch.setattr(begin, "biting", lambda trainer: ())
    found = calls_back(lambda: compared([trainer, "default"]), PACKAGE)
    # The reference calls the objective that it is given, which is its own.
    assert [pair for pair in found if not all(file.startswith("reference/") for file in pair)] == []
