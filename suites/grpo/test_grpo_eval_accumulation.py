"""Known issue ``grpo-eval-accumulation`` (trl 4010, 4669): an evaluation's loss divided by the accumulated gradients.

Right is: with gradient accumulation the loss of an evaluation is beta times its KL, since advantages cancel out in each
group; and an evaluation can come before training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import grpo
from ..verdicts import failure_of, unequal

if TYPE_CHECKING:
    from pytest_trlcompat.launch import LaunchResult

ISSUE = "grpo-eval-accumulation"
pytestmark = pytest.mark.known_issue("grpo-eval-accumulation")


def test_loss(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    def measure() -> Finding:
        run = grpo_runs("single", subject, "single").values[0]["evaluating"]
        failures = {stage: text for stage, text in run["failures"].items() if stage != "evaluate_before"}
        failed = failure_of(ISSUE, failures)
        if failed:
            return Finding(failed, {"failures": failures})
        losses = [entry["eval_loss"] for entry in run["logs"]["train"] if "eval_loss" in entry]
        # Of the corrected trainer, since upstream's KL may be that of other rows: grpo-eval-metrics.
        right = grpo_runs("single", "corrected", "single").values[0]["evaluating"]
        expected = [right["beta"] * entry["eval_kl"] for entry in right["logs"]["train"] if "eval_kl" in entry]
        evidence = {"eval_losses": losses, "beta_times_kl": expected}
        assert len(losses) == grpo.STEPS
        return Finding(Verdict.SILENT if unequal(losses, expected) else Verdict.OK, evidence)

    judge(measure, subject=subject, strategy="single")


def test_before_training(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    def measure() -> Finding:
        run = grpo_runs("single", subject, "single").values[0]["evaluating"]
        stages = ("construction", "evaluate_before")
        failures = {stage: text for stage, text in run["failures"].items() if stage in stages}
        failed = failure_of(ISSUE, failures)
        if failed:
            return Finding(failed, {"failures": failures})
        losses = [entry["eval_loss"] for entry in run["logs"]["evaluate_before"] if "eval_loss" in entry]
        # The policy still is its reference.
        return Finding(Verdict.SILENT if unequal(losses, [0.0]) else Verdict.OK, {"eval_losses": losses})

    judge(measure, subject=subject, strategy="single-before_training")
