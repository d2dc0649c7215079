"""Known issue ``ppo-lr-scheduler-zip``: PPO's learning rate scheduler steps, though DeepSpeed took a group out.

Right is: it trains, and the whole policy moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

if TYPE_CHECKING:
    from .ppo_lives import PPOLives

pytestmark = pytest.mark.known_issue("ppo-lr-scheduler-zip")


def test_training(subject: str, judge: Judge, ppo_lives: PPOLives) -> None:
    def measure() -> Finding:
        life = ppo_lives(subject, "zero2")
        failed = life.failed(["construct_again", "train"], judge.issue)
        if failed is not None:
            return failed
        return Finding(Verdict.OK if life.trained else Verdict.SILENT, {"log": life.log, "moved": life.moved_tensors})

    judge(measure, subject=subject, strategy="zero2")
