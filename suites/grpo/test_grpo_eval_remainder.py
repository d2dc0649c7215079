"""Known issue ``grpo-eval-remainder``: an evaluation that leaves out rows of its last batch.

Right is: on several ranks, where one batch over all of them holds more rows than there are prompts, the loss of a
single process; and in a single process the mean of the batches' losses, each as often as it has rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import grpo
from ..sharding.equivalence import SIGNIFICANT
from ..verdicts import unequal

if TYPE_CHECKING:
    from ..sharding.trainings import Trainings

pytestmark = pytest.mark.known_issue("grpo-eval-remainder")


def test_loss_of_several_batches(subject: str, judge: Judge, trained: Trainings) -> None:
    def measure() -> Finding:
        training = trained.single(subject, "single").first
        evaluation = training["evaluation_in_batches"]
        failure = training["failure"] or evaluation.get("failure")
        if failure is not None:
            return Finding(Verdict.ERROR, {"failure": failure})
        batches = evaluation["batches"]
        rows = [number for number, _ in batches]
        assert rows == [grpo.ROWS, grpo.ROWS // 2], "the last batch is half full"
        assert abs(batches[0][1] - batches[1][1]) > SIGNIFICANT, "else any weights would do"
        truth = sum(number * loss for number, loss in batches) / sum(rows)
        evidence = {"eval_loss": evaluation["loss"], "eval_loss_by_rows": truth, "batches": batches}
        return Finding(Verdict.SILENT if unequal([evaluation["loss"]], [truth]) else Verdict.OK, evidence)

    judge(measure, subject=subject, strategy="single")


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
