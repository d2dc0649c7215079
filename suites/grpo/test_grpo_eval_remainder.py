"""Known issue ``grpo-eval-remainder``: an evaluation on several ranks that leaves out rows of its last batch.

Right is: the loss of a single process, where one batch over all ranks holds more rows than there are prompts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..sharding.equivalence import SIGNIFICANT
from .verdicts import unequal

if TYPE_CHECKING:
    from ..sharding.trainings import Trainings

pytestmark = pytest.mark.known_issue("grpo-eval-remainder")


def test_loss(subject: str, judge: Judge, trained: Trainings) -> None:
    def measure() -> Finding:
        training = trained(subject, "ddp").first
        failure = training["failure"] or training["evaluation_of_part"].get("failure")
        if failure is not None:
            return Finding(Verdict.ERROR, {"failure": failure})
        truth = trained.single("corrected", "ddp").first["evaluation_of_part"]["loss"]
        assert truth > SIGNIFICANT
        loss = training["evaluation_of_part"]["loss"]
        evidence = {"eval_loss": loss, "eval_loss_single": truth}
        return Finding(Verdict.SILENT if unequal([loss], [truth]) else Verdict.OK, evidence)

    judge(measure, subject=subject, strategy="ddp")
