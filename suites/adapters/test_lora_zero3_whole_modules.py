"""Known issue ``lora-zero3-whole-modules`` (deepspeed 7203, 7615): modules that learn whole beside an adapter.

Right is: the output head learns together with the adapter, with a finite gradient for each, and the gradient norms and
the weights are those of the corrected trainer in one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import adapters
from .verdicts import as_in_one_process

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.known_issue("lora-zero3-whole-modules")


def test_training(subject: str, judge: Judge, lora_runs: Callable[[str, str], dict[str, Any]]) -> None:
    def measure() -> Finding:
        run = lora_runs(subject, "zero3-whole")["config"]
        truth = lora_runs("corrected", "single-whole")["config"]
        assert truth["trainable"] == 2 * truth["lora_b"] + 1, "the head beside the two halves of each adapter"
        return as_in_one_process(judge.issue.id, run, truth, adapters.STEPS)

    judge(measure, subject=subject, strategy="zero3")
