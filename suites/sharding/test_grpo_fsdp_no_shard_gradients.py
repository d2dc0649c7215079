"""Known issue ``grpo-fsdp-no-shard-gradients``: accumulated gradients are lost under FSDP1 ``NO_SHARD``.

Right is: gradient norms and weights of two steps, each of two accumulated batches, are those of a single process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.plugin.judging import Judge

from .equivalence import judge_equivalence
from .trainings import NO_SHARD

if TYPE_CHECKING:
    from .trainings import Trainings

pytestmark = pytest.mark.known_issue("grpo-fsdp-no-shard-gradients")


def test_accumulated_gradients(subject: str, judge: Judge, trained: Trainings) -> None:
    judge(lambda: judge_equivalence(trained, subject, NO_SHARD), subject=subject, strategy=NO_SHARD)
