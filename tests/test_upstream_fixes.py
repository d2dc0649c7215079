"""The benchmark of faults that TRL has mended: its list, and what counts as seen."""

from __future__ import annotations

from typing import Any

import pytest
from packaging.version import Version

from benchmarks.upstream_fixes.__main__ import Fix, read_fixes
from benchmarks.upstream_fixes.comparing import changed, gone, share, troubled
from benchmarks.upstream_fixes.looking import launches_of
from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.conformance import rows

FIXES = read_fixes()


@pytest.mark.parametrize("fix", FIXES, ids=lambda fix: str(fix.number))
def test_an_entry_is_of_a_trainer_that_has_rows_and_of_a_known_issue_that_there_is(fix: Fix) -> None:
    assert fix.entry["trainer"] in rows.TRAINERS
    assert Version(fix.entry["wrong_from"]) <= Version(fix.entry["before"]) < Version(fix.entry["after"])
    assert fix.entry["kind"] in ("training", "numbers", "loud", "waste")
    assert "catalogue" not in fix.entry or fix.entry["catalogue"] in known_issues.load()
    assert "commit" in fix.entry or fix.entry.get("catalogue") or fix.entry.get("stages")


def test_each_entry_is_there_once() -> None:
    assert len({(fix.entry["trainer"], fix.entry["link"], fix.entry["title"]) for fix in FIXES}) == len(FIXES)


def differing(**found: float) -> dict[str, Any]:
    return {
        "differing": {
            stage: {"where": "step 0", "expected": [1.0], "found": [number]} for stage, number in found.items()
        }
    }


def test_a_fault_is_seen_where_a_row_shows_something_that_is_gone_afterwards() -> None:
    before = {"one": differing(logs=2.0, gradients=3.0), "two": {"failure": "ValueError"}, "three": {}}
    after = {"one": differing(gradients=3.0), "two": {}}
    assert troubled(before) == ["one", "two"]
    assert gone(before, after) == {"one": ["logs"], "two": ["exception: ValueError"]}
    assert gone(before, after, ["grad"]) == {}
    assert gone(before, before) == {}


def test_what_a_row_that_is_not_tried_or_fails_otherwise_would_show_is_not_known() -> None:
    before = {"one": differing(logs=2.0), "two": {"failure": "ValueError"}, "three": differing(logs=2.0)}
    assert gone(before, {"one": {"absent": ["beta"]}, "two": {"failure": "KeyError"}}) == {}


def test_beside_another_fault_numbers_change() -> None:
    before = {"one": differing(logs=2.0, gradients=3.0)}
    assert changed(before, {"one": differing(logs=2.00001, gradients=4.0)}) == {"one": ["gradients"]}
    assert changed(before, {"one": differing(logs=2.00001)}) == {}


def test_rows_of_several_ranks_are_tried_where_they_are_asked_for() -> None:
    def labels(**asked: Any) -> list[str]:
        return [row.label for launch in launches_of("grpo", **asked) for row in launch]

    alone, every = labels(ranks=False), labels(ranks=True)
    assert {label.partition("-")[0] for label in alone} == {"single"}
    assert set(alone) < set(every)
    assert not any(rows.load("grpo")[label].needs_liger for label in every)
    assert labels(ranks=False, wanted=["ddp-ranks_default"]) == ["ddp-ranks_default"]


def test_a_share_is_said_of_what_there_is() -> None:
    assert share([True, False, True, True]) == "3 of 4 (75 %)"
    assert share([]) == "0 of 0"
