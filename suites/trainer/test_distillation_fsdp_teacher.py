"""Known issue ``distillation-fsdp-teacher``: the teacher of a distillation stays on the CPU under FSDP.

Right is: losses and entropies are those of one process, whatever the strategy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.known_issues import load
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import distillation
from ..launches import Failures
from ..verdicts import failure_of

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

    from ..launches import LaunchCache

ISSUE = "distillation-fsdp-teacher"
TOLERANCE = 1e-4
"""Relative; newer releases of Transformers log four digits and more, and sums are made in another order."""
pytestmark = pytest.mark.known_issue("distillation-fsdp-teacher")


@pytest.mark.parametrize("strategy", load()[ISSUE].strategies)
def test_distillation(strategy: str, subject: str, judge: Judge, launches: LaunchCache, saved_qwen2: TinyModel) -> None:
    def measure() -> Finding:
        ranks = launches(distillation.train, subject, saved_qwen2, strategy=strategy).values
        failures = Failures.of([{"training": rank["failure"]} for rank in ranks])
        failed = failure_of(ISSUE, failures.first)
        if failed is not None:
            return Finding(failed, {**ranks[0], "failures": failures.first, **failures.of_other_ranks})
        (alone,) = launches(distillation.train, subject, saved_qwen2, strategy="single").values
        assert alone["failure"] is None, alone["failure"]
        evidence = {**ranks[0], "alone": {name: alone[name] for name in ("losses", "entropies")}}
        assert len(alone["losses"]) == 3
        assert alone["losses"][0] > 10 * TOLERANCE, "there is nothing to learn from the teacher"
        same = all(
            rank[name] == pytest.approx(alone[name], rel=TOLERANCE)
            for rank in ranks[:1]
            for name in ("losses", "entropies")
        )
        return Finding(Verdict.OK if same else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy=strategy)
