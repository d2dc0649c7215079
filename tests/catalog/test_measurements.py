"""What cells gave, as sets of cells: it says the same as the cells themselves, and is made anew when it must be."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import operator
import os
from pathlib import Path

import pytest

from pytest_trlcompat.catalog import evidence, known_issues, measurements
from pytest_trlcompat.catalog.evidence import Evidence, MeasuredCell
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.measurements import Measurements
from pytest_trlcompat.catalog.ranges import parse
from pytest_trlcompat.catalog.remedies import ways_of
from pytest_trlcompat.catalog.verdict import Verdict

from ..doctor.made_up import cell, issue, predict


@pytest.fixture(scope="module")
def measured() -> Measurements:
    """What the published cells gave, after it was written and read."""
    made = Measurements.of(known_issues.load(), evidence.published())
    return Measurements(json.loads(made.to_json()))


def ids(measured: Measurements, cells: int) -> list[str]:
    return [each.id for number, each in enumerate(measured.cells) if cells >> number & 1]


def test_each_cell_gave_what_its_verdicts_say(measured: Measurements) -> None:
    published = evidence.published()
    keys = {key for each in published.cells for key in each.verdicts if key[1] == "upstream"}
    compared = 0
    for (name, subject, label), verdict in itertools.product(sorted(keys), Verdict):
        if not known_issues.load()[name].is_search:
            expected = [each.id for each in published.cells if each.gave((name, subject, label), verdict)]
            assert ids(measured, measured.gave(name, label, verdict)) == expected, (name, label, verdict)
            compared += bool(expected)
    assert compared > 1000


def test_a_cell_that_another_issue_stopped_does_not_count_for_the_one_that_is_named(measured: Measurements) -> None:
    published = evidence.published()
    keys = {key for each in published.cells for key in each.blocked_by if key[1] == "upstream"}
    compared = 0
    for name, subject, label in sorted(keys):
        blockers = {each.blocked_by.get((name, subject, label), "") for each in published.cells} - {""}
        for by in () if known_issues.load()[name].is_search else blockers:
            expected = [each.id for each in published.cells if each.gave((name, subject, label), Verdict.BLOCKED, by)]
            assert ids(measured, measured.gave(name, label, Verdict.BLOCKED, by)) == expected, (name, label, by)
            compared += 1
    assert compared > 100


def test_the_first_prediction_that_applies_to_a_cell_is_the_catalogues(measured: Measurements) -> None:
    cells = evidence.published().cells
    for entry in itertools.islice(known_issues.load().values(), 0, None, 7):
        for label in () if entry.is_search else entry.labels():
            predicted = measured.predicted(entry, label)
            sets = [those for _, those in predicted]
            assert sum(sets) == functools.reduce(operator.or_, sets, 0), "one prediction decides for a cell"
            for number, each in enumerate(cells):
                first = next((prediction for prediction, those in predicted if those >> number & 1), None)
                assert first is entry.predict("upstream", label, each.versions), (entry.id, label, each.id)


def test_what_helps_is_what_the_catalogue_and_the_cells_say(measured: Measurements) -> None:
    cells = evidence.published().cells
    for entry in itertools.islice(known_issues.load().values(), 0, None, 11):
        if not entry.is_search:
            assert measured.ways(entry) == ways_of(entry, cells)


def test_the_cells_with_a_version() -> None:
    catalog = Catalog({"one": issue(predict("broken", trl="<0.18"))})
    cells = (cell("0.15.2", single="broken"), cell("0.18.2", "4.50.3", single="ok"), cell("1.0.0"))
    measured = Measurements.of(catalog, Evidence("2026-11-21", cells))
    assert measured.every == 0b111
    assert measured.where("trl", parse(">=0.18").covers) == 0b110
    assert measured.having("transformers") == {"4.49.0": 0b101, "4.50.3": 0b010}
    assert measured.having("torch") == {"": 0b111}
    assert measured.where("torch", parse("").covers) == 0
    assert measured.gave("one", "single", Verdict.BROKEN) == 0b001
    assert measured.predicted(catalog["one"], "zero3") == [(catalog["one"].predictions[0], 0b001)]


def test_an_error_counts_as_stopped_only_where_failures_were_not_attributed() -> None:
    catalog = Catalog({"one": issue(predict("broken", trl="<0.18"))})
    new, old = cell("0.15.2", single="error"), dataclasses.replace(cell("0.16.0", single="error"), attributed=False)
    measured = Measurements.of(catalog, Evidence("2026-11-21", (new, old)))
    assert measured.gave("one", "single", Verdict.ERROR) == 0b11
    assert measured.gave("one", "single", Verdict.BLOCKED) == 0b10


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Evidence]:
    """Which evidence was read, with a cache and a source of its own."""
    (tmp_path / "source").write_text("a")
    monkeypatch.setenv("TRLCOMPAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measurements, "_sources", lambda _: [str(tmp_path / "source")])
    asked: list[Evidence] = []

    def published() -> Evidence:
        asked.append(Evidence("2026-11-21", (cell("0.15.2", single="broken"),)))
        return asked[-1]

    monkeypatch.setattr(evidence, "published", published)
    return asked


def made(text: str = "x") -> Catalog:
    catalog = Catalog({"one": issue(predict("broken", trl="<0.18"))})
    catalog.made_from = text
    return catalog


def gave(found: Measurements) -> int:
    return found.gave("one", "single", Verdict.BROKEN)


def test_a_second_process_reads_no_evidence(readings: list[Evidence]) -> None:
    assert [gave(measurements.published(made())) for _ in range(3)] == [1, 1, 1]
    assert len(readings) == 1


def test_what_is_kept_is_made_anew_with_another_catalogue_evidence_or_cure(
    readings: list[Evidence], tmp_path: Path
) -> None:
    measurements.published(made())
    measurements.published(made("y"))
    assert len(readings) == 2
    os.utime(tmp_path / "source", ns=(1, 1))
    measurements.published(made("y"))
    assert len(readings) == 3


def test_nothing_is_kept_of_somebody_elses_catalogue(readings: list[Evidence], tmp_path: Path) -> None:
    for _ in range(2):
        measurements.published(made(""))
    assert len(readings) == 2
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"made_from": "x"}'])
def test_what_is_damaged_is_made_anew(readings: list[Evidence], tmp_path: Path, text: str) -> None:
    measurements.published(made())
    (path,) = (tmp_path / "cache" / "catalog").iterdir()
    path.write_text(text)
    assert gave(measurements.published(made())) == 1
    assert len(readings) == 2


def test_the_evidence_and_the_cures_are_what_it_is_made_from(tmp_path: Path) -> None:
    names = {Path(path).name for path in measurements._sources(tmp_path)}
    assert {"evidence.json", "sampling.py", "kinds.py"} <= names


def test_a_wheel_has_it_beside_the_catalogue(
    readings: list[Evidence], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cells = (MeasuredCell("a", {"trl": "0.15.2"}, {("one", "upstream", "single"): Verdict.BROKEN}),)
    monkeypatch.setattr(measurements, "FILE", tmp_path / "measurements.json")
    measurements.FILE.write_text(Measurements.of(made(), Evidence("2026-11-21", cells)).to_json())
    assert gave(measurements.published(made())) == 1
    assert readings == []
