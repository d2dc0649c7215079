"""Known issue ``ppo-ddp-save``: PPO's policy saved under plain DistributedDataParallel.

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

pytestmark = pytest.mark.known_issue("ppo-ddp-save")


def test_ddp(subject: str, judge: Judge, ppo_runs: PPORuns) -> None:
    def measure() -> Finding:
        run = ppo_runs.read_back(subject, "ddp")
        assert run.trained or "construct_again" in run.failures, run
        return Finding(saves_verdict(run, ppo_stages.SAVES, judge.issue), run.evidence(ppo_stages.SAVES))

    judge(measure, subject=subject, strategy="ddp")
