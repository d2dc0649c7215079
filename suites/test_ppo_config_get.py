"""Known issue ``ppo-config-get``: PPO's policy saved under any ZeRO stage, seen under ZeRO-2.

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

pytestmark = pytest.mark.known_issue("ppo-config-get")


def test_zero2(subject: str, judge: Judge, ppo_lives: PPOLives) -> None:
    def measure() -> Finding:
        life = ppo_lives.read_back(subject, "zero2")
        verdict = saves_verdict(life, ppo_measures.SAVES, judge.issue)
        if subject == "corrected":
            assert life.trained, life
        return Finding(verdict, life.evidence(ppo_measures.SAVES))

    judge(measure, subject=subject, strategy="zero2")
