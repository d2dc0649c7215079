"""The faults of ``nox -s absences``: that each can still be planted, without planting any."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import absences  # type: ignore[import-not-found]  # noqa: E402 - needs the line above
from absences import CELLS, UNIT, Absence, read_absences  # noqa: E402

ABSENCES = read_absences()


@pytest.mark.parametrize("absence", ABSENCES, ids=lambda absence: f"{absence.area}-{absence.what[:60]}")
def test_a_fault_can_be_planted(absence: Absence) -> None:
    assert (ROOT / absence.file).read_text().count(absence.old) == 1
    assert absence.old != absence.new
    assert absence.where in (UNIT, *CELLS)
    assert absence.tests
    for test in absence.tests:
        path, _, name = test.partition("::")
        function = name.rpartition("::")[2].partition("[")[0]
        assert f"def {function}(" in (ROOT / path).read_text() or not name, test


def test_there_are_as_many_as_were_asked_for() -> None:
    assert len(ABSENCES) >= 40


def test_no_fault_for_an_area_is_no_success(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["absences", "nothing-of-this-name"])
    assert absences.main() == 2
    assert "no fault for nothing-of-this-name; areas are" in capsys.readouterr().err
