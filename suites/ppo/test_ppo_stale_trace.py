"""Known issue ``ppo-stale-trace`` (trl 2304, deepspeed 8043): a record of modules that were numbered anew.

Right is: PPO trains under ZeRO-3 on one update per batch, and the numbers of each step are those of the same trainer
under DistributedDataParallel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from .runs import TOLERANCE

if TYPE_CHECKING:
    from .runs import PPORuns

pytestmark = pytest.mark.known_issue("ppo-stale-trace")


def test_one_update_per_batch(subject: str, judge: Judge, ppo_runs: PPORuns) -> None:
    def measure() -> Finding:
        run = ppo_runs(subject, "zero3")
        failed = run.failed(["construct_again", "train"], judge.issue)
        if failed is not None:
            return failed
        difference = run.difference(ppo_runs(subject, "ddp"))
        right = run.trained and difference <= TOLERANCE
        evidence = {"max_difference_to_ddp": difference, "log": run.log}
        return Finding(Verdict.OK if right else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy="zero3")
