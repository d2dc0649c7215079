"""Known issue ``ppo-lr-scheduler-zip``: PPO's learning rate scheduler steps, though DeepSpeed took a group out.

Right is: it trains, and the whole policy moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

if TYPE_CHECKING:
    from .runs import PPORuns

pytestmark = pytest.mark.known_issue("ppo-lr-scheduler-zip")


def test_training(subject: str, judge: Judge, ppo_runs: PPORuns) -> None:
    def measure() -> Finding:
        run = ppo_runs(subject, "zero2")
        failed = run.failed(["construct_again", "train"], judge.issue)
        if failed is not None:
            return failed
        return Finding(Verdict.OK if run.trained else Verdict.SILENT, {"log": run.log, "moved": run.moved_tensors})

    judge(measure, subject=subject, strategy="zero2")
