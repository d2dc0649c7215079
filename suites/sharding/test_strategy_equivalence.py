"""Known issue ``strategy-equivalence``: GRPO under a strategy is the training that it is in a single process.

Right is: with the same seed, data and completions two steps of SGD, gradients clipped, give the same losses, gradient
norms and weights; for tolerances and their reasons see :mod:`equivalence`. This catches silent bugs that nobody has
named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.plugin.judging import Judge

from .equivalence import judge_equivalence

if TYPE_CHECKING:
    from .trainings import Trainings

pytestmark = pytest.mark.known_issue("strategy-equivalence")


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp1", "fsdp2"])
def test_equivalence(strategy: str, subject: str, judge: Judge, trained: Trainings) -> None:
    judge(lambda: judge_equivalence(trained, subject, strategy), subject=subject, strategy=strategy)
