"""Known issue ``ppo-fsdp-rollout``: PPO generates, scores, trains and saves under FSDP1 and FSDP2.

Right is: the numbers of each step are those of DistributedDataParallel, the policy is sharded, and what a fresh process
reads of each save is bitwise the gathered policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import ppo_stages
from .runs import TOLERANCE, saves_verdict

if TYPE_CHECKING:
    from .runs import PPORuns

pytestmark = pytest.mark.known_issue("ppo-fsdp-rollout")


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_training(strategy: str, subject: str, judge: Judge, ppo_runs: PPORuns) -> None:
    def measure() -> Finding:
        run = ppo_runs(subject, strategy)
        failed = run.failed(["construct", "train"], judge.issue)
        if failed is not None:
            return failed
        ppo_runs.read_back(subject, strategy)
        engine = run.engines[strategy]
        evidence = run.evidence(ppo_stages.SAVES) | {
            "max_difference_to_ddp": run.difference(ppo_runs(subject, "ddp")),
            "sharded": engine["local"] < engine["total"],
            "log": run.log,
        }
        right = evidence["trained"] and evidence["sharded"] and evidence["max_difference_to_ddp"] <= TOLERANCE
        saved = saves_verdict(run, ppo_stages.SAVES, judge.issue)
        return Finding(saved if right else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy=strategy)
