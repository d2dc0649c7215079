"""Known issue ``ppo-config-after-grpo``: PPO's configuration made in a process that has imported GRPO's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.judge import Finding, Judge
from pytest_trlcompat.verdict import Verdict

if TYPE_CHECKING:
    from .ppo_lives import PPOLives

pytestmark = pytest.mark.known_issue("ppo-config-after-grpo")


def test_configuration(subject: str, judge: Judge, ppo_lives: PPOLives) -> None:
    def measure() -> Finding:
        failure = ppo_lives(subject, "ddp").failure(["config"])
        if failure is None:
            return Finding(Verdict.OK)
        known = judge.issue.shows((failure["type"],), failure["text"])
        return Finding(Verdict.BROKEN if known else Verdict.ERROR, failure)

    judge(measure, subject=subject, strategy="ddp")
