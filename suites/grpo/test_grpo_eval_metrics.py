"""Known issue ``grpo-eval-metrics`` (trl 3337): metrics of evaluation among those of training, and the reverse.

Right is: every evaluation logs its reward and a KL that goes with its loss, those of the same weights are the same, and
the metrics of training are those of a training that was never evaluated. Advantages cancel out in each group, so that
the loss of an evaluation is beta times its KL, whatever the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import grpo
from ..measured import every
from ..verdicts import LOSS_TOLERANCE, failure_of

if TYPE_CHECKING:
    from pytest_trlcompat.launch import LaunchResult

ISSUE = "grpo-eval-metrics"
pytestmark = pytest.mark.known_issue("grpo-eval-metrics")

COMPARED = ("reward", "kl")


def test_metrics(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    def measure() -> Finding:
        runs = grpo_runs("single", subject, "single").values[0]
        evaluating, undisturbed = runs["evaluating"], runs["undisturbed"]
        # That the evaluation before training fails is a matter of grpo-eval-accumulation.
        failures = {stage: text for stage, text in evaluating["failures"].items() if stage != "evaluate_before"}
        failed = failure_of(ISSUE, failures | undisturbed["failures"])
        if failed:
            return Finding(failed, {"failures": failures | undisturbed["failures"]})
        evidence = {
            "training": _metrics(_of_training(evaluating), ""),
            "training_undisturbed": _metrics(_of_training(undisturbed), ""),
            "evaluations": _metrics(_of_evaluations(evaluating, "train"), "eval_"),
            "evaluation_after": _metrics(_of_evaluations(evaluating, "evaluate_after"), "eval_"),
        }
        return Finding(Verdict.OK if _right(evidence) else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy="single")


def _of_training(run: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in run["logs"]["train"] if "loss" in entry]


def _of_evaluations(run: dict[str, Any], stage: str) -> list[dict[str, Any]]:
    return [entry for entry in run["logs"][stage] if "eval_loss" in entry]


def _metrics(entries: list[dict[str, Any]], prefix: str) -> list[dict[str, Any]]:
    return [{name: entry.get(prefix + name) for name in ("loss", *COMPARED)} for entry in entries]


def _right(evidence: dict[str, Any]) -> bool:
    evaluations, after = evidence["evaluations"], evidence["evaluation_after"]
    assert len(evaluations) == grpo.STEPS
    entries = [*evidence["training"], *evidence["training_undisturbed"], *evaluations, *after]
    if any(entry[name] is None for entry in entries for name in COMPARED) or len(after) != 1:
        return False
    # All evaluations see the same completions.
    same_rewards = every(abs(entry["reward"] - after[0]["reward"]) <= LOSS_TOLERANCE for entry in evaluations)
    same_weights = abs(after[0]["kl"] - evaluations[-1]["kl"]) <= LOSS_TOLERANCE
    return same_rewards and same_weights and _equal(evidence["training"], evidence["training_undisturbed"])


def _equal(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    return len(one) == len(other) and every(
        abs(left[name] - right[name]) <= LOSS_TOLERANCE
        for left, right in zip(one, other, strict=True)
        for name in COMPARED
    )
