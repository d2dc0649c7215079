"""The day's page: what it shows, and that nothing a library says becomes markup."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings

from pytest_trlcompat.watch import page
from pytest_trlcompat.watch.changes import changes_in
from pytest_trlcompat.watch.narrowing import Narrowed
from pytest_trlcompat.watch.outcome import Cause, Outcome

from ..hostile import EVIL, Parsed, lines
from .made_up import DAY, TRL, cell_report, record, watched

ALONE = watched(TRL)


def outcome(said: str = "numbers differ", **options: object) -> Outcome:
    """A day on which TRL 1.1.0 has broken a suite, in the words of ``said``."""
    cell = cell_report(ALONE, record("error", "ok", failure=f"ValueError: {said}"), record("ok", "silent", "grpo-x"))
    changes = changes_in([ALONE], {ALONE.cell.id: cell}, {})
    narrowed = Narrowed("trlcompat bisect", said, "trl", "1.0.0", "1.1.0", report=f"# {said}", reason="")
    found = Outcome(
        day=DAY,
        since=None,
        new=(TRL,),
        plan=(ALONE,),
        cells={ALONE.cell.id: cell},
        base="trl1.0.0-tf5.0.0",
        causes=tuple(Cause((each,), narrowed) for each in changes),
        remarks={"trl 1.1.0": [said]},
        left=(said,),
        by_hand=(said,),
    )
    return dataclasses.replace(found, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", [page.markdown, page.html])
def test_it_says_what_came_out_what_broke_and_what_got_cured(form: object) -> None:
    text = form(outcome())  # type: ignore[operator]
    for words in (
        "1 new release, 1 cell, 2 verdicts",
        "Broke",
        "Cured",
        "What the sources say",
        "Not reached",
        "1.1.0",
    ):
        assert words in text
    assert "not right with a new release" not in text


def test_what_did_not_happen_has_no_heading() -> None:
    text = page.markdown(outcome(causes=(), left=(), by_hand=(), remarks={}))
    assert text.count("\n## ") == 1  # the new releases


def test_ours_is_not_to_be_pasted_upstream() -> None:
    (change,) = changes_in([ALONE], {ALONE.cell.id: cell_report(ALONE, record("silent", subject="corrected"))}, {})
    cause = Cause((change,), None, "not bisected")
    assert page.to_paste(cause) == ""
    text = page.markdown(outcome(causes=(cause,)))
    assert "nothing here is to be reported upstream" in text
    assert "0 broke, 0 cured; 1 cure not right" in text


def test_the_text_to_paste_is_the_bisections_report_or_what_was_measured() -> None:
    first = outcome().causes[0]
    assert page.to_paste(first) == "# numbers differ"
    text = page.to_paste(dataclasses.replace(first, narrowed=None))
    assert "trl 1.1.0" in text
    assert "ValueError: numbers differ" in text


@pytest.mark.parametrize("said", [EVIL])
def test_evil_text_is_no_markup(said: str) -> None:
    check(said)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lines())
def test_no_text_is_markup(said: str) -> None:
    check(said)


def check(said: str) -> None:
    plain, evil = Parsed(page.html(outcome("plain"))), Parsed(page.html(outcome(said)))
    assert evil.tags == plain.tags
    page.markdown(outcome(said)).encode()


def test_what_a_cure_has_uncovered_is_changed_and_not_broken() -> None:
    hidden, seen = record("blocked", None, blocked_by="grpo-x"), record("silent", None)
    base = {hidden.key: (hidden.verdict, hidden.blocked_by)}
    (change,) = changes_in([ALONE], {ALONE.cell.id: cell_report(ALONE, seen)}, base)
    text = page.markdown(outcome(causes=(Cause((change,), None, "not searched"),)))
    assert "0 broke, 0 cured; 1 changed" in text
    assert "## Changed" in text
    assert "## Broke" not in text
