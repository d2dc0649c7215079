"""Known issue ``grpo-needs-triton``: trl 1.15.0 cannot train where Triton is not installed.

Right is: a training that goes through, with the loss of a policy that still is its reference at its first step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..verdicts import failure_of

if TYPE_CHECKING:
    from pytest_trlcompat.launch import LaunchResult

ISSUE = "grpo-needs-triton"
pytestmark = pytest.mark.known_issue("grpo-needs-triton")


def test_training(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    def measure() -> Finding:
        run = grpo_runs("single", subject, "single").values[0]["undisturbed"]
        if failed := failure_of(ISSUE, run["failures"]):
            return Finding(failed, {"failures": run["failures"]})
        evidence = {"losses": run["losses"]}
        return Finding(Verdict.OK if abs(run["losses"][0]) < 1e-5 else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy="single")
