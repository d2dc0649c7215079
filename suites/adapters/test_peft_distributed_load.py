"""Known issue ``peft-distributed-load`` (peft 3628): ranks cannot load adapters, so training cannot be resumed.

Right is: a training that was resumed from its checkpoint ends with the same adapter as one that was not interrupted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..sharding.trainings import greatest_difference
from ..verdicts import failure_of

if TYPE_CHECKING:
    from .trainings import AdapterTrainings

ISSUE = "peft-distributed-load"
pytestmark = pytest.mark.known_issue("peft-distributed-load")


def test_resuming(subject: str, judge: Judge, adapter_trainings: AdapterTrainings) -> None:
    def measure() -> Finding:
        training = adapter_trainings(subject, "ddp")
        found, failures = training.found, training.failures("training", "resuming")
        if failed := failure_of(ISSUE, failures.first):
            return Finding(failed, {"failures": failures.first, **failures.of_other_ranks})
        evidence = {
            "tensors": len(found["adapter"]),
            "grad_norm": found["grad_norm"],
            "grad_norm_resumed": found["grad_norm_resumed"],
            "resumed_off_by": greatest_difference(found["resumed"], found["adapter"]),
        }
        right = found["resumed"] == found["adapter"] and evidence["tensors"] > 0
        return Finding(Verdict.OK if right else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy="ddp")
