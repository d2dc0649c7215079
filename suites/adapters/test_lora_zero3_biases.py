"""Known issue ``lora-zero3-biases`` (deepspeed 7435): the gradient of a bias whose weight is frozen, under ZeRO-3.

Right is: an adapter learns together with the biases beside it, with a finite gradient for each, and the gradient norm
and the weights after a step are those of the corrected trainer in one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import adapters
from .verdicts import as_in_one_process

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.known_issue("lora-zero3-biases")


def test_training(subject: str, judge: Judge, lora_runs: Callable[[str, str], dict[str, Any]]) -> None:
    def measure() -> Finding:
        run = lora_runs(subject, "zero3-biases")["config"]
        truth = lora_runs("corrected", "single-biases")["config"]
        assert truth["trainable"] > 2 * truth["lora_b"], "biases beside the two halves of each adapter"
        return as_in_one_process(judge.issue.id, run, truth, adapters.BIASES["steps"])

    judge(measure, subject=subject, strategy="zero3")
