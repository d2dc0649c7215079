"""Known issue ``grpo-warnings-issued``: GRPO's constructor writes to a dictionary that models no longer have.

Right is: the trainer is built and takes all its steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import grpo
from ..verdicts import failure_of

if TYPE_CHECKING:
    from pytest_trlcompat.launch import LaunchResult

ISSUE = "grpo-warnings-issued"
pytestmark = pytest.mark.known_issue("grpo-warnings-issued")


def test_construction(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    def measure() -> Finding:
        run = grpo_runs("single", subject, "single").values[0]["undisturbed"]
        construction = {stage: text for stage, text in run["failures"].items() if stage == "construction"}
        if failed := failure_of(ISSUE, construction):
            return Finding(failed, {"failures": construction})
        if subject == "corrected":
            assert len(run["losses"]) == grpo.STEPS * run["accumulated"], run
        return Finding(Verdict.OK, {"failures": run["failures"]})

    judge(measure, subject=subject, strategy="single")
