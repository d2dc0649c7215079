"""Known issue ``dpo-precomputed-in-memory`` (trl 6291): reference log-probabilities of a dataset in memory.

Right is: with ``precompute_ref_log_probs`` every rank has the log-probabilities of all pairs by the reference model
that the trainer was given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.plugin.judging import Judge

from ..in_rank import dpo
from .precomputing import judge_precomputed

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

    from ..launches import LaunchCache

ISSUE = "dpo-precomputed-in-memory"
pytestmark = pytest.mark.known_issue("dpo-precomputed-in-memory")


@pytest.mark.parametrize("strategy", known_issues.load()[ISSUE].strategies)
def test_precomputing(strategy: str, subject: str, judge: Judge, launches: LaunchCache, saved_qwen2: TinyModel) -> None:
    judge(
        lambda: judge_precomputed(ISSUE, dpo.precomputed, subject, strategy, launches, saved_qwen2),
        subject=subject,
        strategy=strategy,
    )
