"""Known issue ``lora-zero3-biases`` (deepspeed 7435): the gradient of a bias whose weight is frozen, under ZeRO-3.

Right is: an adapter learns together with the biases beside it, with a finite gradient for each, and the gradient norm
and the weights after a step are those of the corrected trainer in one process.
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

ISSUE = "lora-zero3-biases"
pytestmark = pytest.mark.known_issue("lora-zero3-biases")


def test_training(subject: str, judge: Judge, lora_runs: Callable[[str, str], dict[str, Any]]) -> None:
    def measure() -> Finding:
        run = lora_runs(subject, "zero3-biases")["config"]
        failed = failure_of(ISSUE, {"train": run["failure"]} if run["failure"] else {})
        if failed:
            return Finding(failed, run)
        truth = lora_runs("corrected", "single-biases")["config"]
        assert len(truth["grad_norm"]) == lora_measures.BIASES["steps"]
        assert truth["trainable"] > 2 * truth["lora_b"], "biases beside the two halves of each adapter"
        keys = ("trainable", "without_gradient", "frozen_moved", "grad_norm", "weights")
        evidence = {key: run[key] for key in keys} | {f"{key}_in_one_process": truth[key] for key in keys}
        wrong = (
            run["trainable"] != truth["trainable"]
            or run["without_gradient"]
            or run["frozen_moved"]
            or unequal(run["grad_norm"], truth["grad_norm"], relative=True)
            or unequal([run["weights"]], [truth["weights"]], relative=True)
        )
        return Finding(Verdict.SILENT if wrong else Verdict.OK, evidence)

    judge(measure, subject=subject, strategy="zero3")
