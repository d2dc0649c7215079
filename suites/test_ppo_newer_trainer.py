"""Known issue ``ppo-newer-trainer``: PPOv2 makes no optimizer with newer releases of Transformers.

Right is: the trainer is built, and trains to the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.judge import Finding, Judge
from pytest_trlcompat.verdict import Verdict

if TYPE_CHECKING:
    from .ppo_lives import PPOLives

pytestmark = pytest.mark.known_issue("ppo-newer-trainer")


def test_construction(subject: str, judge: Judge, ppo_lives: PPOLives) -> None:
    def measure() -> Finding:
        life = ppo_lives(subject, "ddp")
        failure = life.failure(["construct"])
        if failure is None:
            assert life.trained or subject == "upstream", life
            return Finding(Verdict.OK, life.evidence(["construct"]))
        known = judge.issue.shows((failure["type"],), failure["text"])
        return Finding(Verdict.BROKEN if known else Verdict.ERROR, failure)

    judge(measure, subject=subject, strategy="ddp")
