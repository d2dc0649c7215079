"""Known issue ``grpo-evaluate``: trl 0.14.0 cannot evaluate, since Transformers takes its prompts for tensors.

Right is: an evaluation in training, and the same loss from one that is called after it, where no step lies between.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import grpo
from ..verdicts import failure_of, unequal

if TYPE_CHECKING:
    from pytest_trlcompat.launch import LaunchResult

ISSUE = "grpo-evaluate"
pytestmark = pytest.mark.known_issue("grpo-evaluate")


def test_evaluation(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    def measure() -> Finding:
        run = grpo_runs("single", subject, "single").values[0]["training"]
        failed = failure_of(ISSUE, run["failures"])
        if failed:
            return Finding(failed, {"failures": run["failures"]})
        during, after = (list(run["eval_losses"][when].values()) for when in ("train", "evaluate_after"))
        right = len(during) == grpo.STEPS and all(math.isfinite(loss) and loss > 0 for loss in during)
        verdict = Verdict.OK if right and not unequal(after, during[-1:]) else Verdict.SILENT
        return Finding(verdict, {"eval_losses": during, "eval_loss_after": after})

    judge(measure, subject=subject, strategy="single")
