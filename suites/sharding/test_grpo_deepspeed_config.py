"""Known issue ``grpo-deepspeed-config``: optimizer and scheduler of a DeepSpeed config, and GRPO's reference model.

Right is: they are the policy's alone, and the training is that of a single process with the same optimizer and learning
rates; for tolerances and their reasons see :mod:`equivalence`. The config's values are ``auto``, as in the examples of
Transformers' documentation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..verdicts import failure_of
from .equivalence import judge_equivalence

if TYPE_CHECKING:
    from .trainings import Trainings

ISSUE = "grpo-deepspeed-config"
pytestmark = pytest.mark.known_issue("grpo-deepspeed-config")


@pytest.mark.parametrize("strategy", ["zero2-optimizer", "zero3-optimizer", "zero2-scheduler", "zero3-scheduler"])
def test_training(strategy: str, subject: str, judge: Judge, trained: Trainings) -> None:
    def measure() -> Finding:
        training = trained(subject, strategy)
        failures = {"train": training.failure} if training.failure else {}
        if failed := failure_of(ISSUE, failures):
            return Finding(failed, {"failures": failures, **training.failures_of_other_ranks})
        found = judge_equivalence(trained, subject, strategy)
        optimizer = training.first["ref_optimizer"]
        evidence = {**found.evidence, "optimizer_of_reference": optimizer}
        wasted = found.verdict is Verdict.OK and optimizer is not None
        return replace(found, verdict=Verdict.WASTEFUL if wasted else found.verdict, evidence=evidence)

    judge(measure, subject=subject, strategy=strategy)
