"""What changed, by the release that brings it."""

from __future__ import annotations

import pytest

from pytest_trlcompat.catalog.verdict import Record, Verdict
from pytest_trlcompat.watch.changes import Change, Kind, changes_in, known_wrong, verdicts_of
from pytest_trlcompat.watch.plan import WatchedCell

from .made_up import ALL, TRANSFORMERS, TRL, cell_report, record, watched

ALONE, OTHER = watched(TRL), watched(TRANSFORMERS, "5.0.0")


def changes(
    *shown: tuple[WatchedCell, list[Record]], base: list[Record] | None = None
) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(each.cell.about, each.kind.value, each.strategies) for each in full(*shown, base=base)]


def full(*shown: tuple[WatchedCell, list[Record]], base: list[Record] | None = None) -> list[Change]:
    cells = {cell.cell.id: cell_report(cell, *records) for cell, records in shown}
    return changes_in([cell for cell, _ in shown], cells, verdicts_of(cell_report(ALL, *(base or []))))


@pytest.mark.parametrize(
    ("verdict", "expected", "kind"),
    [
        ("silent", "ok", "broke"),
        ("error", "ok", "broke"),
        ("broken", "absent", "broke"),
        ("silent", None, "broke"),
        ("hang", None, "broke"),
        ("ok", "silent", "cured"),
        ("ok", "blocked", "cured"),
        ("absent", "broken", "cured"),
        ("broken", "silent", "changed"),
        ("absent", "ok", "changed"),
    ],
)
def test_kinds_of_changes(verdict: str, expected: str | None, kind: str) -> None:
    assert changes((ALONE, [record(verdict, expected)])) == [("trl 1.1.0 alone", kind, ("ddp",))]


@pytest.mark.parametrize(
    ("verdict", "expected"), [("ok", "ok"), ("silent", "silent"), ("ok", None), ("untestable", "ok"), ("blocked", None)]
)
def test_what_is_no_change(verdict: str, expected: str | None) -> None:
    """What could not be tested says nothing of the release, and what another issue stops says nothing of this one."""
    assert changes((ALONE, [record(verdict, expected)])) == []


def test_another_blocking_issue_than_the_predicted_one_is_a_change() -> None:
    one = record("blocked", "blocked", blocked_by="grpo-a", blocked_by_expected="grpo-b")
    (change,) = full((ALONE, [one]))
    assert change.kind is Kind.CHANGED
    assert "blocked by grpo-a, predicted blocked by grpo-b" in change.sentence


def test_what_the_known_stack_shows_as_well_is_no_change() -> None:
    """There the catalogue is wrong, and no release is to blame."""
    assert changes((ALONE, [record("silent")]), base=[record("silent")]) == []
    assert changes((ALONE, [record("silent")]), base=[record("ok")]) == [("trl 1.1.0 alone", "broke", ("ddp",))]
    assert [each.key for each in known_wrong(cell_report(ALL, record("silent"), record("ok", strategy="fsdp1")))] == [
        ("grpo-token-normalizer", "upstream", "ddp")
    ]


def test_a_change_belongs_to_the_release_that_shows_it_alone() -> None:
    (change,) = full((ALL, [record("silent")]), (ALONE, [record("silent")]), (OTHER, [record("ok")]))
    assert change.cell is ALONE
    assert change.elsewhere == (ALL.cell.id,)


def test_what_no_release_shows_alone_is_of_all_together() -> None:
    found = changes((ALL, [record("silent")]), (ALONE, [record("ok")]), (OTHER, [record("ok")]))
    assert found == [("the newest of all", "broke", ("ddp",))]


def test_of_two_releases_the_first_has_brought_it() -> None:
    first, second = watched(TRANSFORMERS), watched(TRL)  # five days later
    assert changes((second, [record("silent")]), (first, [record("silent")])) == [
        ("transformers 5.1.0 alone", "broke", ("ddp",))
    ]


def test_strategies_with_the_same_verdict_stand_together() -> None:
    found = changes((ALONE, [record("silent", strategy="zero3"), record("silent"), record("broken", strategy="fsdp1")]))
    assert sorted(found) == [
        ("trl 1.1.0 alone", "broke", ("ddp", "zero3")),
        ("trl 1.1.0 alone", "broke", ("fsdp1",)),
    ]


def test_the_same_failure_in_two_suites_has_one_cause() -> None:
    failure = {"exception": "ImportError", "message": "cannot import name 'x' from 'transformers'", "traceback": ""}
    found = full((ALONE, [record("error", **failure), record("error", issue="grpo-lora-checkpointing", **failure)]))
    assert len(found) == 2
    assert {each.cause for each in found} == {"ImportError: cannot import name 'x' from 'transformers'"}
    wrong = full((ALONE, [record("silent"), record("silent", issue="grpo-lora-checkpointing")]))
    assert len({each.cause for each in wrong}) == 2


def test_what_another_issue_has_hidden_is_not_broken_by_its_cure() -> None:
    """It was a problem before; now it is seen."""
    hidden, seen = record("blocked", None, blocked_by="lora-zero3-checkpointing"), record("silent", None)
    (change,) = full((ALONE, [seen]), base=[hidden])
    assert change.kind is Kind.CHANGED
    assert change.sentence.endswith("silent, nothing was predicted; before it was blocked by lora-zero3-checkpointing")


def test_what_was_measured_before_counts_more_than_what_was_predicted() -> None:
    (change,) = full((ALONE, [record("broken", "ok")]), base=[record("silent", "ok")])
    assert change.kind is Kind.CHANGED


def test_a_corrected_trainer_that_fails_is_ours() -> None:
    (change,) = full((ALONE, [record("silent", subject="corrected")]))
    assert change.is_ours
    (cured,) = full((ALONE, [record("ok", "silent", subject="corrected")]))
    assert not cured.is_ours
    assert cured.record.verdict is Verdict.OK
