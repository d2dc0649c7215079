"""Known issue ``ppo-config-get``: PPO's policy saved under any ZeRO stage, seen under ZeRO-2.

Right is: what a fresh process reads of each save is bitwise the policy of that moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import ppo_stages
from .runs import saves_verdict

if TYPE_CHECKING:
    from .runs import PPORuns

pytestmark = pytest.mark.known_issue("ppo-config-get")


def test_zero2(subject: str, judge: Judge, ppo_runs: PPORuns) -> None:
    def measure() -> Finding:
        run = ppo_runs.read_back(subject, "zero2")
        verdict = saves_verdict(run, ppo_stages.SAVES, judge.issue)
        if subject == "corrected":
            assert run.trained, run
        return Finding(verdict, run.evidence(ppo_stages.SAVES))

    judge(measure, subject=subject, strategy="zero2")
