"""Known issue ``grpo-fsdp-generation`` (trl 2796): GRPO generates beneath FSDP1's wrapper, and the root stays sharded.

Right is: greedy generation before the first step gives the tokens that a single process gives, row by row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from .trainings import NO_SHARD

if TYPE_CHECKING:
    from .trainings import Training, Trainings

pytestmark = pytest.mark.known_issue("grpo-fsdp-generation")

SHARDED_ROOT = "'weight' must be 2-D"


@pytest.mark.parametrize("strategy", ["fsdp1", NO_SHARD, "fsdp2"])
def test_generation(strategy: str, subject: str, judge: Judge, trained: Trainings) -> None:
    def measure() -> Finding:
        alone, training = trained.single(subject, strategy), trained(subject, strategy)
        if not alone.first_tokens:
            return Finding(Verdict.ERROR, {"failure": alone.failure})
        evidence = {
            "failure": training.failure,
            **training.failures_of_other_ranks,
            "tokens": training.first_tokens,
            "tokens_single": alone.first_tokens,
        }
        return Finding(_verdict(training, alone), evidence)

    judge(measure, subject=subject, strategy=strategy)


def _verdict(training: Training, alone: Training) -> Verdict:
    if training.first_tokens:  # what failed afterwards is another matter
        return Verdict.OK if training.first_tokens == alone.first_tokens else Verdict.SILENT
    return Verdict.BROKEN if SHARDED_ROOT in (training.failure or "") else Verdict.ERROR
