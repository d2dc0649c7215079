"""Known issue ``grpo-zero3-no-gather``: GRPO under ZeRO-3 with ``ds3_gather_for_generation=False``.

Right is: the training that it is with the weights gathered to generate, which is TRL's default. With the same seed it
generates the same tokens, so that losses are equal but for the order of sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..grpo.verdicts import failure_of
from ..launches import Failures
from .memory import NO_GATHER, train

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

    from ..launches import LaunchCache

ISSUE = "grpo-zero3-no-gather"
pytestmark = pytest.mark.known_issue("grpo-zero3-no-gather")

TOLERANCE = 1e-5
"""Absolute, of losses of which one is beyond :data:`SIGNIFICANT`."""
SIGNIFICANT = 1e-4


def test_training(subject: str, judge: Judge, launches: LaunchCache, deep_qwen2: TinyModel) -> None:
    def measure() -> Finding:
        ranks = train(launches, deep_qwen2, subject, NO_GATHER)
        failures = Failures.of([{"train": rank["failure"]} for rank in ranks])
        if failed := failure_of(ISSUE, failures.first):
            return Finding(failed, {"failures": failures.first, **failures.of_other_ranks})
        gathered = train(launches, deep_qwen2, "corrected", "zero3")
        evidence = {"losses": ranks[0]["losses"], "losses_gathered": gathered[0]["losses"]}
        assert gathered[0]["failure"] is None, gathered[0]["failure"]
        assert max(map(abs, evidence["losses_gathered"])) > SIGNIFICANT, evidence
        right = evidence["losses"] == pytest.approx(evidence["losses_gathered"], abs=TOLERANCE)
        return Finding(Verdict.OK if right else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy=NO_GATHER)
