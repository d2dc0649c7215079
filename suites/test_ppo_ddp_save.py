"""Known issue ``ppo-ddp-save``: PPO's policy saved under plain DistributedDataParallel.

Right is: what a fresh process reads of each save is bitwise the policy of that moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.plugin.judging import Finding, Judge

from . import ppo_measures
from .ppo_lives import saves_verdict

if TYPE_CHECKING:
    from .ppo_lives import PPOLives

pytestmark = pytest.mark.known_issue("ppo-ddp-save")


def test_ddp(subject: str, judge: Judge, ppo_lives: PPOLives) -> None:
    def measure() -> Finding:
        life = ppo_lives.read_back(subject, "ddp")
        assert life.trained or "construct_again" in life.failures, life
        return Finding(saves_verdict(life, ppo_measures.SAVES, judge.issue), life.evidence(ppo_measures.SAVES))

    judge(measure, subject=subject, strategy="ddp")
