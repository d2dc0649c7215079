"""Known issue ``grpo-lora-stale-trace`` (trl 4693, deepspeed 8043): a record of modules that were numbered anew.

Right is: an adapter trains under ZeRO-3 without a reference model, where a step has one forward, and every gradient
norm and the weights are those of the corrected trainer in one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import adapters
from .verdicts import as_in_one_process

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.known_issue("grpo-lora-stale-trace")


def test_training(subject: str, judge: Judge, lora_runs: Callable[[str, str], dict[str, Any]]) -> None:
    def measure() -> Finding:
        run = lora_runs(subject, "zero3-one_forward")["config"]
        truth = lora_runs("corrected", "single-one_forward")["config"]
        return as_in_one_process(judge.issue.id, run, truth, adapters.ONE_FORWARD["steps"])

    judge(measure, subject=subject, strategy="zero3")
