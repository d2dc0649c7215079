"""Verdicts: the JSON line that carries a verdict from a cell to the report."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest

from pytest_trlcompat.catalog.verdict import Record, RecordError, Verdict, append_record, read_records


def record(**changes: object) -> Record:
    values: dict[str, object] = {
        "issue": "grpo-logits-to-keep",
        "subject": "upstream",
        "strategy": "single",
        "verdict": Verdict.WASTEFUL,
        "expected": Verdict.WASTEFUL,
        "evidence": {"logits_length": 20, "kept": 6, "max_abs_error": 3e-7},
        "seconds": 0.9,
    }
    return Record(**{**values, **changes})  # type: ignore[arg-type]


def test_line_has_the_fields_of_the_design() -> None:
    line = record().to_json()
    assert "\n" not in line
    assert json.loads(line) == {
        "issue": "grpo-logits-to-keep",
        "subject": "upstream",
        "strategy": "single",
        "verdict": "wasteful",
        "expected": "wasteful",
        "evidence": {"logits_length": 20, "kept": 6, "max_abs_error": 3e-7},
        "seconds": 0.9,
    }


def test_round_trip() -> None:
    assert Record.from_json(record().to_json()) == record()
    assert Record.from_json(record(expected=None).to_json()).expected is None


def test_numbers_that_json_does_not_know_are_kept_as_text() -> None:
    evidence = {"losses": [0.5, math.nan], "deep": {"error": math.inf}, "pair": (1, -math.inf)}
    line = record(evidence=evidence).to_json()
    assert json.loads(line)["evidence"] == {"losses": [0.5, "nan"], "deep": {"error": "inf"}, "pair": [1, "-inf"]}


@pytest.mark.parametrize(("expected", "right"), [(Verdict.WASTEFUL, True), (Verdict.OK, False), (None, True)])
def test_as_predicted(expected: Verdict | None, right: bool) -> None:
    assert record(expected=expected).as_predicted is right


def test_what_could_not_be_tested_speaks_against_no_prediction_and_for_none() -> None:
    untested = record(verdict=Verdict.UNTESTABLE, evidence={"reason": "no kernel"})
    assert (untested.as_predicted, untested.untested, untested.reason) == (True, True, "no kernel")
    assert (record().untested, record(evidence={"reason": "x"}).reason) == (False, "")
    assert not record(expected=Verdict.UNTESTABLE, verdict=Verdict.OK).as_predicted
    assert Record.from_json(untested.to_json()) == untested


def test_the_newest_verdict_of_a_key_counts(tmp_path: Path) -> None:
    results = tmp_path / "folder" / "cell.jsonl"
    append_record(results, record(verdict=Verdict.ERROR))
    append_record(results, record(subject="corrected", verdict=Verdict.OK))
    append_record(results, record())
    assert [(found.subject, found.verdict) for found in read_records(results)] == [
        ("upstream", Verdict.WASTEFUL),
        ("corrected", Verdict.OK),
    ]
    assert len(results.read_text().splitlines()) == 3


def test_a_torn_last_line_is_passed_over_and_others_are_not(tmp_path: Path) -> None:
    results = tmp_path / "cell.jsonl"
    append_record(results, record())
    whole = results.read_text()
    results.write_text(whole + whole[:40])
    assert read_records(results) == [record()]
    results.write_text(whole[:40] + "\n" + whole)
    with pytest.raises(RecordError, match=r"cell\.jsonl, line 1: not a verdict line"):
        read_records(results)


def test_a_full_disk_leaves_no_torn_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "cell.jsonl"
    append_record(results, record())
    write = os.write  # stands for a disk that takes only the first bytes
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:10]))
    with pytest.raises(OSError, match="no space left for a verdict") as caught:
        append_record(results, record())
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    append_record(results, record(subject="corrected"))
    assert [found.subject for found in read_records(results)] == ["upstream", "corrected"]


def test_no_file_means_no_verdicts(tmp_path: Path) -> None:
    assert read_records(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("line", ["[]", "{}", '{"issue": 1}', record().to_json().replace('"wasteful"', '"good"')])
def test_what_is_no_verdict_is_refused(line: str) -> None:
    with pytest.raises(RecordError, match="not a verdict line"):
        Record.from_json(line)
