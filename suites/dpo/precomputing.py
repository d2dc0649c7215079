"""Reference log-probabilities that DPO computes before training, held against one forward pass for each completion.

Runs in the test process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Absent, Finding

from ..in_rank import dpo
from ..launches import Failures
from ..measured import every
from ..verdicts import failure_of

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

    from ..launches import LaunchCache

__all__ = ["judge_precomputed"]

_REFUSED = "You cannot use `precompute_ref_log_probs=True` with Deepspeed ZeRO-3"

TOLERANCE = 1e-4
"""Absolute, of sums of log-probabilities of some tens: batches pad, and sums have another order."""
SIGNIFICANT = 0.1
"""By more the reference models differ in a completion, and completions of one of them."""


def judge_precomputed(
    issue: str, body: Callable[..., Any], subject: str, strategy: str, launches: LaunchCache, model: TinyModel
) -> Finding:
    """``silent`` where a rank has other log-probabilities than the reference model that its trainer was given says.

    Args:
        body: of :mod:`suites.in_rank.dpo`. Each launch has a dataset of its own, and so no cache of another one.

    Raises:
        Absent: the release refuses it under this strategy.
    """
    with tempfile.TemporaryDirectory(prefix="trlcompat-") as folder:
        (expected,) = launches(dpo.save, model, Path(folder), strategy="single").values
        size = 1 if strategy == "single" else 2
        # Nothing is trained, so that there may be no engine.
        result = launches(body, subject, model, Path(folder), strategy=strategy, world_size=size, sharded=False)
    failures = Failures.of([{"precomputing": rank["failure"]} for rank in result.values])
    if _REFUSED in failures.first.get("precomputing", ""):
        raise Absent("DPO refuses precompute_ref_log_probs under ZeRO-3 until 0.28, and says so")
    if failed := failure_of(issue, failures.first):
        return Finding(failed, {"failures": failures.first, **failures.of_other_ranks})
    assert max(map(_distance, *(each["chosen"] for each in expected))) > SIGNIFICANT, expected
    evidence: dict[str, Any] = {"pairs": len(expected[0]["chosen"]), "largest_differences": []}
    for rank in result.values:
        wanted = expected[-len(rank["found"]) :]
        evidence["largest_differences"].append(
            [
                max(max(map(_distance, found[side], right[side])) for side in dpo.SIDES)
                for found, right in zip(rank["found"], wanted, strict=True)
            ]
        )
    right = every(each <= TOLERANCE for rank in evidence["largest_differences"] for each in rank)
    return Finding(Verdict.OK if right else Verdict.SILENT, evidence)


def _distance(one: float, other: float) -> float:
    return abs(one - other)
