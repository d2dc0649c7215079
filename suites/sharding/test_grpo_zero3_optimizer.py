"""Known issue ``grpo-zero3-optimizer`` (trl 2782): generation under ZeRO-3, and DeepSpeed's hooks during it.

Right is: hooks lifted while it generates, in training and in evaluation, before, during and after; back afterwards; and
the numbers of a single process. With the hooks in place DeepSpeed gathers every parameter again for every token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import grpo
from ..launches import Failures
from ..verdicts import failure_of, mean_over_ranks, of_resuming, same_at, unequal

if TYPE_CHECKING:
    from pytest_trlcompat.launch import LaunchResult

ISSUE = "grpo-zero3-optimizer"
pytestmark = pytest.mark.known_issue("grpo-zero3-optimizer")

LEFT_BY_THE_ENGINE = 3
"""Hooks that are not the parameters': DeepSpeed keeps one to three on the root module, by its release."""
ALL = 100
"""Fewer than the tiny model's hooks when all are there: 133 to 135."""


def test_training_and_evaluation(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    def measure() -> Finding:
        ranks = grpo_runs("training", subject, "zero3").values
        alone = grpo_runs("single", "corrected", "single").values[0]["training"]
        evidence = _evidence(ranks, alone)
        return Finding(_verdict(evidence), evidence)

    judge(measure, subject=subject, strategy="zero3")


def test_unwrapping_the_bare_module(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    def measure() -> Finding:
        ranks = grpo_runs("training", subject, "zero3").values
        every = [{stage: rank["direct"][stage] for stage in ("before", "after")} for rank in ranks]
        failures = Failures.of([{stage: found["failure"] for stage, found in direct.items()} for direct in every])
        direct = every[0]
        evidence = {"hooks_before_during_after": {stage: found.get("hooks") for stage, found in direct.items()}}
        if failed := failure_of(ISSUE, failures.first):
            return Finding(failed, evidence | {"failures": failures.first, **failures.of_other_ranks})
        before, during, after = direct["after"]["hooks"]
        if before < ALL:  # training failed before there was an engine
            training = Failures.of([rank["failures"] for rank in ranks])
            return Finding(Verdict.ERROR, evidence | {"failures": training.first, **training.of_other_ranks})
        if after != before:
            return Finding(Verdict.SILENT, evidence)
        return Finding(Verdict.WASTEFUL if during > LEFT_BY_THE_ENGINE else Verdict.OK, evidence)

    judge(measure, subject=subject, strategy="zero3-direct")


def test_resuming(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    def measure() -> Finding:
        return of_resuming(grpo_runs("resumed", subject, "zero3").values)

    judge(measure, subject=subject, strategy="zero3-resume")


def _evidence(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> dict[str, Any]:
    first, failures = ranks[0], Failures.of([rank["failures"] for rank in ranks])
    return {
        "failures": failures.first,
        **failures.of_other_ranks,
        "hooks_in_generation": {stage: sorted(set(hooks)) for stage, hooks in first["hooks_in_generation"].items()},
        "hooks_in_loss": sorted(set(first["hooks_in_loss"])),
        "hooks_at_the_end": first["hooks_at_the_end"],
        "losses": mean_over_ranks([rank["losses"] for rank in ranks]),
        "losses_single": alone["losses"],
        "grad_norm": first["grad_norm"],
        "grad_norm_single": alone["grad_norm"],
        "eval_losses": first["eval_losses"],
        "eval_losses_single": alone["eval_losses"],
    }


def _verdict(evidence: dict[str, Any]) -> Verdict:
    failed = failure_of(ISSUE, evidence["failures"])
    if failed:
        return failed
    assert len(evidence["losses"]) == grpo.STEPS
    wrong = (
        unequal(evidence["losses"], evidence["losses_single"])
        or unequal(evidence["grad_norm"], evidence["grad_norm_single"], relative=True)
        or any(
            not same_at(evidence["eval_losses"].get(when, {}), expected)
            for when, expected in evidence["eval_losses_single"].items()
        )
    )
    whole = evidence["hooks_at_the_end"]
    if wrong or whole < ALL or evidence["hooks_in_loss"] != [whole]:
        return Verdict.SILENT
    alive = max(max(hooks) for hooks in evidence["hooks_in_generation"].values())
    return Verdict.WASTEFUL if alive > LEFT_BY_THE_ENGINE else Verdict.OK
