"""Predictions as they were measured, in the files of the real catalogue."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

from pytest_trlcompat.catalog import known_issues, reading
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.watch.editing import Correction, NotCorrected, correct

FOLDER = known_issues.SOURCE
FILE = known_issues.file_of("grpo-eval-remainder")
NEWEST = {
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "trl": "1.17.0",
    "accelerate": "1.15.0",
    "deepspeed": "0.19.8",
    "peft": "0.21.2",
    "datasets": "5.2.0",
}
CURED = Correction(
    issue="grpo-eval-remainder",
    subject="upstream",
    strategies=("ddp",),
    verdict=Verdict.OK,
    by="",
    package="trl",
    first="1.17.0",
    versions=NEWEST,
    why="measured",
)


def predicted(edited: Mapping[Path, str], trl: str, issue: str = CURED.issue) -> tuple[Verdict | None, ...]:
    """Under ddp, for both subjects."""
    found = reading.read(FOLDER, edited).get_issue(issue)
    predictions = [found.predict(subject, "ddp", {**NEWEST, "trl": trl}) for subject in ("upstream", "corrected")]
    return tuple(each.verdict if each is not None else None for each in predictions)


def test_a_cure_is_predicted_from_its_release_on_and_the_rest_stays() -> None:
    edited = correct(FOLDER, {}, CURED)
    assert list(edited) == [FILE]
    text, old = edited[FILE], FILE.read_text(encoding="utf-8")
    before = predicted({}, "1.16.0")
    assert before[0] is not Verdict.OK
    assert predicted(edited, "1.16.0") == before
    assert predicted(edited, "1.17.0")[0] is Verdict.OK
    added = [line for line in text.splitlines() if line not in set(old.splitlines())]
    assert len(added) == 1
    assert 'trl = ">=1.17' in added[0]
    untouched = iter(text.splitlines())
    assert all(line in untouched for line in old.splitlines())  # in their order: nothing is changed, only inserted


def test_where_nothing_was_predicted_the_new_one_stands_at_the_end() -> None:
    """Of corrected trainers: right everywhere, until somebody says otherwise."""
    edited = correct(FOLDER, {}, dataclasses.replace(CURED, subject="corrected", verdict=Verdict.SILENT))
    assert edited[FILE].splitlines()[-2].startswith('    { verdict = "silent", subject = "corrected", when = { trl')
    assert predicted(edited, "1.17.0")[1] is Verdict.SILENT
    assert predicted(edited, "1.16.0")[1] is Verdict.OK


def test_corrections_of_several_issues_are_of_several_files_and_of_one_add_up() -> None:
    one = correct(FOLDER, {}, CURED)
    both = correct(FOLDER, one, dataclasses.replace(CURED, subject="corrected", verdict=Verdict.SILENT))
    assert predicted(both, "1.17.0") == (Verdict.OK, Verdict.SILENT)
    other = correct(FOLDER, both, dataclasses.replace(CURED, issue="grpo-eval-metrics"))
    assert list(other) == [FILE, known_issues.file_of("grpo-eval-metrics")]
    assert other[FILE] == both[FILE]


def test_a_prediction_that_follows_from_the_blocking_issue_is_corrected_where_it_is_written() -> None:
    """Its line has no ranges of its own: the new one is narrower than those of the issue that it names."""
    versions = {**NEWEST, "trl": "1.15.0"}
    change = {"issue": "grpo-deepspeed-config", "strategies": ("zero2-optimizer",), "first": "1.15.0"}
    edited = correct(FOLDER, {}, dataclasses.replace(CURED, versions=versions, **change))  # type: ignore[arg-type]
    lines = edited[known_issues.file_of("grpo-deepspeed-config")].splitlines()
    (number,) = (number for number, line in enumerate(lines) if 'why = "measured"' in line)
    assert 'when = { trl = ">=1.15' in lines[number]
    assert 'by = "grpo-needs-triton"' in lines[number + 1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"verdict": Verdict.ERROR}, "nobody has explained the error"),
        ({"verdict": Verdict.HANG}, "nobody has explained the hang"),
        ({"verdict": Verdict.UNTESTABLE}, "no verdict about a release"),
        ({"issue": "grpo-no-such-issue"}, "no issue grpo-no-such-issue"),
        ({"strategies": ("ddp", "zero9")}, "the catalogue would refuse it"),
        ({"verdict": Verdict.BLOCKED, "by": "grpo-eval-remainder"}, "the catalogue would refuse it"),
        # Of releases without the trainer one table speaks, for all its issues.
        ({"versions": {**NEWEST, "trl": "0.12.2"}, "first": "0.12.2"}, "follows from another entry"),
    ],
)
def test_what_a_person_must_write(change: dict[str, object], reason: str) -> None:
    with pytest.raises(NotCorrected, match=reason):
        correct(FOLDER, {}, dataclasses.replace(CURED, **change))  # type: ignore[arg-type]


def test_a_text_with_quotes_is_still_toml() -> None:
    edited = correct(FOLDER, {}, dataclasses.replace(CURED, why='says "no" \\ maybe'))
    assert predicted(edited, "1.17.0")[0] is Verdict.OK


def test_a_file_without_a_line_for_each_prediction_is_left_to_a_person() -> None:
    text = FILE.read_text(encoding="utf-8").replace("prediction = [\n", "prediction = [ ")
    with pytest.raises(NotCorrected, match="does not have its predictions one a line"):
        correct(FOLDER, {FILE: text}, CURED)
