"""Known issue ``grpo-lora-stale-trace`` (trl 4693, deepspeed 8043): a record of modules that were numbered anew.

Right is: an adapter trains under ZeRO-3 without a reference model, where a step has one forward, and every gradient
norm and the weights are those of the corrected trainer in one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.judge import Finding, Judge
from pytest_trlcompat.verdict import Verdict

from . import lora_measures
from .grpo_verdicts import failure_of, unequal

if TYPE_CHECKING:
    from collections.abc import Callable

ISSUE = "grpo-lora-stale-trace"
pytestmark = pytest.mark.known_issue("grpo-lora-stale-trace")


def test_training(subject: str, judge: Judge, lora_runs: Callable[[str, str], dict[str, Any]]) -> None:
    def measure() -> Finding:
        run = lora_runs(subject, "zero3-one_forward")["config"]
        failed = failure_of(ISSUE, {"train": run["failure"]} if run["failure"] else {})
        if failed:
            return Finding(failed, run)
        truth = lora_runs("corrected", "single-one_forward")["config"]
        assert len(truth["grad_norm"]) == lora_measures.ONE_FORWARD["steps"]
        assert truth["grad_norm"][-1] > 0
        keys = ("grad_norm", "weights")
        evidence = {key: run[key] for key in keys} | {f"{key}_in_one_process": truth[key] for key in keys}
        wrong = unequal(run["grad_norm"], truth["grad_norm"], relative=True)
        wrong = wrong or unequal([run["weights"]], [truth["weights"]], relative=True)
        return Finding(Verdict.SILENT if wrong else Verdict.OK, evidence)

    judge(measure, subject=subject, strategy="zero3")
