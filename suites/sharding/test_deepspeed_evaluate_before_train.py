"""Known issue ``deepspeed-evaluate-before-train`` (transformers 44889): an evaluation under ZeRO-3, then training.

Right is: the evaluations and the training of a single process, and as many of DeepSpeed's hooks as without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import grpo
from ..launches import Failures
from ..verdicts import failure_of, mean_over_ranks, same_at, unequal

if TYPE_CHECKING:
    from pytest_trlcompat.launch import LaunchResult

ISSUE = "deepspeed-evaluate-before-train"
pytestmark = pytest.mark.known_issue("deepspeed-evaluate-before-train")


def test_training_after_an_evaluation(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    def measure() -> Finding:
        ranks = grpo_runs("training", subject, "zero3", evaluate_first=True).values
        failures = Failures.of([rank["failures"] for rank in ranks])
        if failed := failure_of(ISSUE, failures.first):
            return Finding(failed, {"failures": failures.first, **failures.of_other_ranks})
        alone = grpo_runs("single", "corrected", "single").values[0]["training"]
        undisturbed = grpo_runs("training", subject, "zero3").values[0]
        evidence = _evidence(ranks, alone, undisturbed)
        return Finding(_verdict(evidence), evidence)

    judge(measure, subject=subject, strategy="zero3")


def _evidence(ranks: list[dict[str, Any]], alone: dict[str, Any], undisturbed: dict[str, Any]) -> dict[str, Any]:
    first = ranks[0]
    return {
        "losses": mean_over_ranks([rank["losses"] for rank in ranks]),
        "losses_single": alone["losses"],
        "grad_norm": first["grad_norm"],
        "grad_norm_single": alone["grad_norm"],
        "eval_losses": first["eval_losses"],
        "eval_losses_single": alone["eval_losses"],
        "hooks_in_generation": {stage: sorted(set(hooks)) for stage, hooks in first["hooks_in_generation"].items()},
        "hooks_at_the_end": first["hooks_at_the_end"],
        "hooks_without_evaluation": undisturbed["hooks_at_the_end"],
    }


def _verdict(evidence: dict[str, Any]) -> Verdict:
    assert len(evidence["losses"]) == grpo.STEPS
    found = evidence["eval_losses"]
    wrong = (
        unequal(evidence["losses"], evidence["losses_single"])
        or unequal(evidence["grad_norm"], evidence["grad_norm_single"], relative=True)
        or not same_at(
            found["evaluate_before"], {0: 0.0}
        )  # the policy still is its reference, and advantages cancel out
        or any(not same_at(found[when], losses) for when, losses in evidence["eval_losses_single"].items())
    )
    if wrong:
        return Verdict.SILENT
    extra = evidence["hooks_at_the_end"] - evidence["hooks_without_evaluation"]
    return Verdict.WASTEFUL if extra else Verdict.OK
