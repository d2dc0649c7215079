"""Known issue ``dpo-precomputed-fsdp2``: DPO under FSDP2 cannot precompute the reference's log-probabilities.

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

ISSUE = "dpo-precomputed-fsdp2"
pytestmark = pytest.mark.known_issue("dpo-precomputed-fsdp2")


@pytest.mark.parametrize("strategy", known_issues.load()[ISSUE].strategies)
def test_precomputing(strategy: str, subject: str, judge: Judge, launches: LaunchCache, saved_qwen2: TinyModel) -> None:
    judge(
        lambda: judge_precomputed(ISSUE, dpo.precomputed_from_files, subject, strategy, launches, saved_qwen2),
        subject=subject,
        strategy=strategy,
    )
