"""Known issue ``ppo-newer-trainer``: PPOv2 makes no optimizer with newer releases of Transformers.

Right is: the trainer is built, and trains to the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

if TYPE_CHECKING:
    from .ppo_lives import PPOLives

pytestmark = pytest.mark.known_issue("ppo-newer-trainer")


def test_construction(subject: str, judge: Judge, ppo_lives: PPOLives) -> None:
    def measure() -> Finding:
        life = ppo_lives(subject, "ddp")
        failed = life.failed(["construct"], judge.issue)
        if failed is not None:
            return failed
        assert life.trained or subject == "upstream", life
        return Finding(Verdict.OK, life.evidence(["construct"]))

    judge(measure, subject=subject, strategy="ddp")
