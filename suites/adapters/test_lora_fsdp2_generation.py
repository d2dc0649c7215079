"""Known issue ``lora-fsdp2-generation`` (trl 4550): GRPO cannot generate with adapters that FSDP2 shards.

Right is: the gradient norms of a training in one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import adapter_saving
from ..sharding.trainings import built_as_asked
from ..verdicts import failure_of, unequal

if TYPE_CHECKING:
    from .trainings import AdapterTrainings

ISSUE = "lora-fsdp2-generation"
pytestmark = pytest.mark.known_issue("lora-fsdp2-generation")


def test_training(subject: str, judge: Judge, adapter_trainings: AdapterTrainings) -> None:
    def measure() -> Finding:
        training = adapter_trainings(subject, "fsdp2")
        found, truth = training.found, adapter_trainings("corrected", "single").found
        failures = training.failures("training")
        failure = failures.first.get("training")
        built_as_asked("fsdp2", training.engines, failure)
        evidence = {
            "failure": failure,
            **failures.of_other_ranks,
            "grad_norm": found["grad_norm"],
            "single": truth["grad_norm"],
        }
        if failed := failure_of(ISSUE, failures.first):
            return Finding(failed, evidence)
        assert len(truth["grad_norm"]) == adapter_saving.STEPS
        wrong = unequal(found["grad_norm"], truth["grad_norm"], relative=True)
        return Finding(Verdict.SILENT if wrong else Verdict.OK, evidence)

    judge(measure, subject=subject, strategy="fsdp2")
