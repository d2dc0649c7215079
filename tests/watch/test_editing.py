"""Predictions as they were measured, in the text of the real catalogue."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.watch.editing import Correction, NotCorrected, correct

TEXT = Path(known_issues.__file__).with_name("catalog.toml").read_text(encoding="utf-8")
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


def predicted(text: str, tmp_path: Path, trl: str, issue: str = CURED.issue) -> tuple[Verdict | None, ...]:
    """Under ddp, for both subjects."""
    (tmp_path / "catalog.toml").write_text(text)
    found = known_issues.load.__wrapped__(tmp_path / "catalog.toml").get_issue(issue)
    predictions = [found.predict(subject, "ddp", {**NEWEST, "trl": trl}) for subject in ("upstream", "corrected")]
    return tuple(each.verdict if each is not None else None for each in predictions)


def test_a_cure_is_predicted_from_its_release_on_and_the_rest_stays(tmp_path: Path) -> None:
    text = correct(TEXT, CURED)
    before = predicted(TEXT, tmp_path, "1.16.0")
    assert before[0] is not Verdict.OK
    assert predicted(text, tmp_path, "1.16.0") == before
    assert predicted(text, tmp_path, "1.17.0")[0] is Verdict.OK
    added = [line for line in text.splitlines() if line not in set(TEXT.splitlines())]
    assert len(text) > len(TEXT)
    assert any('trl = ">=1.17' in line for line in added)
    untouched = iter(text.splitlines())
    assert all(line in untouched for line in TEXT.splitlines())  # in their order: nothing is changed, only inserted


def test_where_nothing_was_predicted_the_new_one_stands_at_the_end(tmp_path: Path) -> None:
    """Of corrected trainers: right everywhere, until somebody says otherwise."""
    ours = dataclasses.replace(CURED, subject="corrected", verdict=Verdict.SILENT)
    text = correct(TEXT, ours)
    assert predicted(text, tmp_path, "1.17.0")[1] is Verdict.SILENT
    assert predicted(text, tmp_path, "1.16.0")[1] is Verdict.OK


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
        correct(TEXT, dataclasses.replace(CURED, **change))  # type: ignore[arg-type]


def test_a_text_with_quotes_is_still_toml(tmp_path: Path) -> None:
    text = correct(TEXT, dataclasses.replace(CURED, why='says "no" \\ maybe'))
    assert predicted(text, tmp_path, "1.17.0")[0] is Verdict.OK
