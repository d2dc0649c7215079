"""The doctor's answers: which issues affect a stack, when, and under which strategies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_trlcompat.doctor.applicable import StrategyError

from .made_up import ask, effects, issue, only, predict

# Which issues apply


@pytest.mark.parametrize("verdict", ["broken", "silent", "wasteful", "error", "hang"])
def test_a_problem_affects_the_stack(verdict: str) -> None:
    assert effects(ask("trl==0.15.2", issues=[issue(predict(verdict))])) == [(("single", "zero3"), verdict, "")]


@pytest.mark.parametrize("verdict", ["ok", "absent", "untestable"])
def test_a_right_or_missing_result_does_not(verdict: str) -> None:
    found = ask("trl==0.15.2", issues=[issue(predict(verdict))])
    assert found.issues == ()
    assert found.clear == ("one",)
    assert found.unpredicted == ()


def test_an_unknown_package_makes_the_answer_conditional() -> None:
    entry = issue(predict("broken", trl="<0.18", accelerate=">=1.0,<1.9"), predict("ok"))
    assert effects(ask("trl==0.15.2", issues=[entry])) == [(("single", "zero3"), "broken", "accelerate >=1.0,<1.9")]
    assert effects(ask("trl==0.15.2", "accelerate==1.3.0", issues=[entry])) == [(("single", "zero3"), "broken", "")]
    assert effects(ask("trl==0.15.2", "accelerate==1.9.0", issues=[entry])) == []
    assert effects(ask("trl==0.15.2", "accelerate>=1.8", issues=[entry])) == [
        (("single", "zero3"), "broken", "accelerate <1.9")
    ]


def test_an_issue_affects_a_pre_release_if_it_may() -> None:
    assert effects(ask("trl==0.18.0.dev0")) == [(("single", "zero3"), "broken", "trl <0.18")]


def test_issues_without_a_prediction_are_listed() -> None:
    found = ask("trl==0.9.6", issues=[issue(predict("broken", trl=">=0.14,<0.18"), predict("ok", trl=">=0.18"))])
    assert (found.issues, found.clear, found.unpredicted) == ((), ("one",), ("one",))


def test_an_issue_that_needs_a_package_shows_only_with_it() -> None:
    entry = issue(predict("broken"), needs=("peft",))
    assert effects(ask("trl==0.15.2", issues=[entry], complete=True)) == []
    assert effects(ask("trl==0.15.2", "peft==0.14.0", issues=[entry], complete=True)) != []
    assert effects(ask("trl==0.15.2", issues=[entry])) != []


def test_the_worst_issue_comes_first() -> None:
    verdicts = ["wasteful", "broken", "silent"]
    entries = [issue(predict(verdict), name=verdict) for verdict in verdicts]
    found = ask("trl==1", issues=entries)
    assert [applicable.issue.id for applicable in found.issues] == ["silent", "broken", "wasteful"]


def test_of_issues_with_one_verdict_the_most_severe_comes_first() -> None:
    severities = ["message", "numbers", "weights", "cost", "crash"]
    entries = [replace(issue(predict("silent"), name=severity), severity=severity) for severity in severities]
    found = ask("trl==1", issues=entries)
    assert [applicable.issue.id for applicable in found.issues] == ["weights", "crash", "numbers", "cost", "message"]


# Strategies


def test_without_deepspeed_its_strategies_are_left_out() -> None:
    found = ask("trl==0.15.2", complete=True)
    assert effects(found) == [(("single",), "broken", "")]
    assert found.left_out == "zero1, zero2, zero3: deepspeed is not installed"
    assert ask("trl==0.15.2", "deepspeed==0.16.4", complete=True).left_out == ""


def test_a_strategy_selects_its_variants_too() -> None:
    entry = issue(
        predict("silent", ("zero3-swap",)),
        predict("broken", ("zero3*",)),
        predict("wasteful"),
        strategies=("single", "zero3", "zero3-swap"),
    )
    assert effects(ask("trl==1", issues=[entry], strategies=["zero3"])) == [
        (("zero3",), "broken", ""),
        (("zero3-swap",), "silent", ""),
    ]
    assert effects(ask("trl==1", issues=[entry], strategies=["zero3-swap"])) == [
        (("zero3-swap",), "silent", ""),
    ]
    assert effects(ask("trl==1", issues=[entry], strategies=["fsdp1"])) == []


def test_a_variant_that_an_issue_does_not_know_is_judged_as_its_strategy() -> None:
    assert effects(ask("trl==0.15.2", strategies=["zero3-mine"])) == [(("zero3",), "broken", "")]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zero4", "unknown strategy 'zero4'; known are single, ddp, "),
        ("zero3", "strategy zero3 needs deepspeed, which"),
    ],
)
def test_an_impossible_strategy_is_refused(name: str, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        ask("trl==0.15.2", strategies=[name], complete=True)


def test_it_says_so_if_the_corrected_trainer_does_not_help() -> None:
    entry = issue(predict("error", ("zero3",), subject="corrected", trl="<0.15"), predict("broken"), cure="a.b")
    assert only(ask("trl==0.14.0", issues=[entry])).uncured == "error under zero3: error because"
    assert only(ask("trl==0.15.0", issues=[entry])).uncured == ""
