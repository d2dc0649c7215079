"""Known issue ``ppo-config-after-grpo``: PPO's configuration made in a process that has imported GRPO's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

if TYPE_CHECKING:
    from .runs import PPORuns

pytestmark = pytest.mark.known_issue("ppo-config-after-grpo")


def test_configuration(subject: str, judge: Judge, ppo_runs: PPORuns) -> None:
    def measure() -> Finding:
        return ppo_runs(subject, "ddp").failed(["config"], judge.issue) or Finding(Verdict.OK)

    judge(measure, subject=subject, strategy="ddp")
