"""Known issue ``ppo-newer-trainer``: PPOv2 makes no optimizer with newer releases of Transformers.

Right is: the trainer is built, and trains to the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

if TYPE_CHECKING:
    from .runs import PPORuns

pytestmark = pytest.mark.known_issue("ppo-newer-trainer")


def test_construction(subject: str, judge: Judge, ppo_runs: PPORuns) -> None:
    def measure() -> Finding:
        run = ppo_runs(subject, "ddp")
        failed = run.failed(["construct"], judge.issue)
        if failed is not None:
            return failed
        assert run.trained or subject == "upstream", run
        return Finding(Verdict.OK, run.evidence(["construct"]))

    judge(measure, subject=subject, strategy="ddp")
