"""Known issue ``ppo-config-get``: PPO's policy saved under any ZeRO stage, seen under ZeRO-2.

Right is: what a fresh process reads of each save is bitwise the policy of that moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.plugin.judging import Judge

if TYPE_CHECKING:
    from .runs import PPORuns

pytestmark = pytest.mark.known_issue("ppo-config-get")


def test_zero2(subject: str, judge: Judge, ppo_runs: PPORuns) -> None:
    judge(lambda: ppo_runs.saved(subject, "zero2", judge.issue), subject=subject, strategy="zero2")
