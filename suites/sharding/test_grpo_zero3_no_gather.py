"""Known issue ``grpo-zero3-no-gather``: GRPO under ZeRO-3 with ``ds3_gather_for_generation=False``.

Right is: the training that it is with the weights gathered to generate, which is TRL's default. With the same seed it
generates the same tokens, so that the norms of its gradients are equal but for the order of sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..launches import Failures
from ..verdicts import failure_of
from .memory import NO_GATHER, train

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

    from ..launches import LaunchCache

ISSUE = "grpo-zero3-no-gather"
pytestmark = pytest.mark.known_issue("grpo-zero3-no-gather")

TOLERANCE = 1e-4
"""Relative."""
SIGNIFICANT = 1e-3
"""At least one norm is beyond it, so that equality says something."""


def test_training(subject: str, judge: Judge, launches: LaunchCache, layered_qwen2: TinyModel) -> None:
    def measure() -> Finding:
        ranks = train(launches, layered_qwen2, subject, NO_GATHER)
        failures = Failures.of([{"train": rank["failure"]} for rank in ranks])
        if failed := failure_of(ISSUE, failures.first):
            return Finding(failed, {"failures": failures.first, **failures.of_other_ranks})
        gathered = train(launches, layered_qwen2, subject, "zero3")
        if others := Failures.of([{"train": rank["failure"]} for rank in gathered]).first:
            return Finding(Verdict.ERROR, {"failures": others})
        evidence = {"grad_norm": ranks[0]["grad_norm"], "grad_norm_gathered": gathered[0]["grad_norm"]}
        assert max(evidence["grad_norm_gathered"]) > SIGNIFICANT, evidence
        right = evidence["grad_norm"] == pytest.approx(evidence["grad_norm_gathered"], rel=TOLERANCE)
        return Finding(Verdict.OK if right else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy=NO_GATHER)
