"""Known issues that another one hides: one line each where that one is described, in full where it is not."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest

from pytest_trlcompat.catalog.known_issues import KnownIssue, Prediction
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.doctor.diagnosis import Diagnosis
from pytest_trlcompat.doctor.text import show

from .made_up import Run, ask, cell, issue, predict

HIDDEN = "Hidden by one, which stops training first: two."


def blocked(by: str = "one", strategies: tuple[str, ...] = (), **when: str) -> Prediction:
    return Prediction(Verdict.BLOCKED, "upstream", when, strategies, "training fails", by)


def two(*predictions: Prediction, strategies: tuple[str, ...] = ("single", "zero3")) -> KnownIssue:
    return issue(*predictions, name="two", strategies=strategies)


def text_of(diagnosis: Diagnosis) -> str:
    file = io.StringIO()
    show(diagnosis, file)
    return " ".join(file.getvalue().split())


def test_what_another_issue_hides_is_named_in_one_line_and_still_counts() -> None:
    found = ask("trl==0.15.2", issues=[issue(predict("broken")), two(blocked())])
    assert [(each.issue.id, found.hidden_by(each)) for each in found.issues] == [
        ("one", ()),
        ("two", ("one",)),
    ]
    text = text_of(found)
    assert "2 known issues affect this stack; 1 of them hidden by others." in text
    assert HIDDEN in text
    assert "one: title" in text
    assert "two: title" not in text


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (predict("ok"), blocked()),  # what hides it does not show
        (predict("broken", ("single",)), blocked()),  # it does not hide it everywhere
        (predict("broken", accelerate="<1.0"), blocked()),  # it may not
        (predict("broken", ("zero3",)), predict("silent", ("single",))),  # and it shows elsewhere
    ],
)
def test_what_may_be_seen_is_described_in_full(first: Prediction, second: Prediction) -> None:
    found = ask("trl==0.15.2", issues=[issue(first), two(second, blocked())])
    text = text_of(found)
    assert HIDDEN not in text
    assert "two: title" in text
    assert "one stops it first: training fails" in text


def test_a_hidden_issue_is_the_least_of_all_problems_and_a_problem() -> None:
    found = ask("trl==0.15.2", issues=[two(blocked()), issue(predict("wasteful"))])
    assert [each.issue.id for each in found.issues] == ["one", "two"]
    (effect,) = found.issues[1].effects
    assert (effect.verdict, effect.blocked_by) == (Verdict.BLOCKED, "one")


def test_the_status_is_1_where_all_is_hidden(doctor: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = doctor("trl==0.15.2", "transformers==4.52.4", "--strategy", "single", "--json")
    assert status == 1
    found = {each["id"]: each for each in json.loads(out)["issues"]}
    (when,) = found["grpo-sampling"]["when"]
    assert (when["verdict"], when["blocked_by"]) == ("blocked", "grpo-train-sampler")
    assert "blocked_by" not in found["grpo-train-sampler"]["when"][0]


def test_an_error_of_before_failures_were_attributed_measures_a_hidden_issue() -> None:
    new = dataclasses.replace(cell("0.15.2"), verdicts={("two", "upstream", "single"): Verdict.ERROR})
    old = dataclasses.replace(new, attributed=False)
    for measured, level in ((old, "measured"), (new, "unmeasured")):
        issues = [issue(predict("broken")), two(blocked(trl="<0.18"), strategies=("single",))]
        found = ask("trl==0.15.2", issues=issues, cells=[measured])
        (effect,) = found.issues[1].effects
        assert (effect.verdict.value, effect.confidence.level.value) == ("blocked", level)
