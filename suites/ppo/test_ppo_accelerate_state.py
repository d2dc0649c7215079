"""Known issue ``ppo-accelerate-state`` (trl 2377, 2555, 3453): PPO built in the environment of ``accelerate launch``.

Right is: the trainer is built, and its engine is DeepSpeed's, of the requested stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

if TYPE_CHECKING:
    from .runs import PPORuns

pytestmark = pytest.mark.known_issue("ppo-accelerate-state")


@pytest.mark.parametrize("stage", [2, 3])
def test_construction(stage: int, subject: str, judge: Judge, ppo_runs: PPORuns) -> None:
    def measure() -> Finding:
        run = ppo_runs(subject, f"zero{stage}")
        failed = run.failed(["construct"], judge.issue)
        if failed is not None:
            return failed
        found = run.engines["deepspeed"]["zero_stage"]
        return Finding(Verdict.OK if found == stage else Verdict.SILENT, {"zero_stage": found})

    judge(measure, subject=subject, strategy=f"zero{stage}")
