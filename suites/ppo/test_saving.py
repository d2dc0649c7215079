"""Whether what PPO saves reads back as the policy of that moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import ppo_stages
from .runs import saves_verdict

if TYPE_CHECKING:
    from .runs import PPORuns


@pytest.mark.known_issue("ppo-config-get")
def test_zero2(subject: str, judge: Judge, ppo_runs: PPORuns) -> None:
    """PPO's policy saved under any ZeRO stage, seen under ZeRO-2.

    Right is: what a fresh process reads of each save is bitwise the policy of that moment.
    """
    judge(lambda: ppo_runs.saved(subject, "zero2", judge.issue), subject=subject, strategy="zero2")


@pytest.mark.known_issue("ppo-ddp-save")
def test_ddp(subject: str, judge: Judge, ppo_runs: PPORuns) -> None:
    """PPO's policy saved under plain DistributedDataParallel.

    Right is: what a fresh process reads of each save is bitwise the policy of that moment.
    """

    def measure() -> Finding:
        run = ppo_runs.read_back(subject, "ddp")
        assert run.trained or "construct_again" in run.failures, run
        return Finding(saves_verdict(run, ppo_stages.SAVES, judge.issue), run.evidence(ppo_stages.SAVES))

    judge(measure, subject=subject, strategy="ddp")


@pytest.mark.known_issue("ppo-zero3-save")
def test_zero3(subject: str, judge: Judge, ppo_runs: PPORuns) -> None:
    """PPO's policy saved under ZeRO-3, and two published ways around it (trl 2122, 2885).

    Right is: what a fresh process reads of each save (after construction, of a checkpoint, at the end) is bitwise the
    gathered policy of that moment.
    """
    judge(lambda: ppo_runs.saved(subject, "zero3", judge.issue), subject=subject, strategy="zero3")


@pytest.mark.known_issue("ppo-zero3-save")
@pytest.mark.parametrize("subject", ["upstream"])
@pytest.mark.parametrize("workaround", ppo_stages.WORKAROUNDS)
def test_workaround(workaround: str, subject: str, judge: Judge, ppo_runs: PPORuns) -> None:
    """Under TRL's own trainer alone: the corrected one needs none."""

    def measure() -> Finding:
        run = ppo_runs.read_back(subject, "zero3")
        return Finding(saves_verdict(run, [workaround], judge.issue), run.evidence([workaround]))

    judge(measure, subject=subject, strategy=f"zero3-{workaround}")
