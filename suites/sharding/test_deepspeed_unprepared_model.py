"""Known issue ``deepspeed-unprepared-model``: a Trainer that does not give DeepSpeed the model that it trains.

Right is: GRPO trains, and DeepSpeed's engine holds its policy. What it computes is the matter of
``strategy-equivalence``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..verdicts import failure_of

if TYPE_CHECKING:
    from .trainings import Trainings

ISSUE = "deepspeed-unprepared-model"
pytestmark = pytest.mark.known_issue("deepspeed-unprepared-model")


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_training(strategy: str, subject: str, judge: Judge, trained: Trainings) -> None:
    def measure() -> Finding:
        training = trained(subject, strategy)
        failures = {"train": training.failure} if training.failure else {}
        evidence = {"failures": failures, **training.failures_of_other_ranks, "engines": dict(training.engines)}
        if failed := failure_of(ISSUE, failures):
            return Finding(failed, evidence)
        return Finding(Verdict.OK if "deepspeed" in training.engines else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy=strategy)
