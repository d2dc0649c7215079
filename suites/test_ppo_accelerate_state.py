"""Known issue ``ppo-accelerate-state`` (trl 2377, 2555, 3453): PPO built in the environment of ``accelerate launch``.

Right is: the trainer is built, and its engine is DeepSpeed's, of the stage that was asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

if TYPE_CHECKING:
    from .ppo_lives import PPOLives

pytestmark = pytest.mark.known_issue("ppo-accelerate-state")


@pytest.mark.parametrize("stage", [2, 3])
def test_construction(stage: int, subject: str, judge: Judge, ppo_lives: PPOLives) -> None:
    def measure() -> Finding:
        life = ppo_lives(subject, f"zero{stage}")
        failed = life.failed(["construct"], judge.issue)
        if failed is not None:
            return failed
        found = life.engines["deepspeed"]["zero_stage"]
        return Finding(Verdict.OK if found == stage else Verdict.SILENT, {"zero_stage": found})

    judge(measure, subject=subject, strategy=f"zero{stage}")
