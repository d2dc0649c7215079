"""Reference log-probabilities that DPO computes before training, compared with one forward pass for each completion.

Right is: with ``precompute_ref_log_probs`` every rank has the log-probabilities of all pairs by the reference model
that the trainer was given.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.catalog.known_issues import load
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Absent, Finding, Judge

from ..in_rank import dpo
from ..launches import Failures
from ..measured import every
from ..verdicts import failure_of

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

    from ..launches import LaunchCache

_REFUSED = "You cannot use `precompute_ref_log_probs=True` with Deepspeed ZeRO-3"

TOLERANCE = 1e-4
"""Absolute, of sums of log-probabilities of some tens: batches pad, and sums have another order."""
SIGNIFICANT = 0.1
"""By more the reference models differ in a completion, and completions of one of them."""


@pytest.fixture
def judge_precomputed(judge: Judge, subject: str, launches: LaunchCache, saved_qwen2: TinyModel) -> Callable[..., None]:
    """Judge what a body of :mod:`suites.in_rank.dpo` precomputes under a strategy."""

    def judge_body(body: Callable[..., Any], strategy: str) -> None:
        issue = judge.issue.id
        judge(
            lambda: _of_precomputed(issue, body, subject, strategy, launches, saved_qwen2),
            subject=subject,
            strategy=strategy,
        )

    return judge_body


@pytest.mark.known_issue("dpo-fsdp-ref-model")
@pytest.mark.parametrize("strategy", load()["dpo-fsdp-ref-model"].strategies)
def test_reference_model_under_fsdp(strategy: str, judge_precomputed: Callable[..., None]) -> None:
    """DPO's reference model under FSDP."""
    judge_precomputed(dpo.precomputed_from_files, strategy)


@pytest.mark.known_issue("dpo-precomputed-fsdp2")
@pytest.mark.parametrize("strategy", load()["dpo-precomputed-fsdp2"].strategies)
def test_fsdp2(strategy: str, judge_precomputed: Callable[..., None]) -> None:
    """DPO under FSDP2 cannot precompute the reference's log-probabilities."""
    judge_precomputed(dpo.precomputed_from_files, strategy)


@pytest.mark.known_issue("dpo-precomputed-in-memory")
@pytest.mark.parametrize("strategy", load()["dpo-precomputed-in-memory"].strategies)
def test_dataset_in_memory(strategy: str, judge_precomputed: Callable[..., None]) -> None:
    """Reference log-probabilities of a dataset in memory (trl 6291)."""
    judge_precomputed(dpo.precomputed, strategy)


@pytest.mark.known_issue("dpo-precomputed-other-model")
@pytest.mark.parametrize("strategy", load()["dpo-precomputed-other-model"].strategies)
def test_cache_of_another_model(strategy: str, judge_precomputed: Callable[..., None]) -> None:
    """DPO takes another reference model's log-probabilities from a cache.

    Right is: the log-probabilities are those of the trainer's own reference model, and not of the one of an earlier
    training on the same dataset.
    """
    judge_precomputed(dpo.precomputed_from_files, strategy)


@pytest.mark.known_issue("dpo-precomputed-reference-kept")
def test_reference_is_let_go(subject: str, judge: Judge, launches: LaunchCache, saved_qwen2: TinyModel) -> None:
    """A reference model that nothing asks any more.

    Right is: with ``precompute_ref_log_probs`` and no reference model of its own a trainer keeps the policy alone.
    """

    def measure() -> Finding:
        with tempfile.TemporaryDirectory(prefix="trlcompat-") as folder:
            launches(dpo.save, saved_qwen2, Path(folder), strategy="single")
            (run,) = launches(
                dpo.held_parameters, subject, saved_qwen2, Path(folder), strategy="single", sharded=False
            ).values
        failures = {"precomputing": run["failure"]} if run["failure"] else {}
        if failed := failure_of(judge.issue.id, failures):
            return Finding(failed, {"failures": failures})
        return Finding(Verdict.WASTEFUL if run["beside"] else Verdict.OK, run)

    judge(measure, subject=subject, strategy="single")


def _of_precomputed(
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
    # Otherwise the log-probabilities of the other reference model would pass as well.
    assert max(map(_distance, *(reference_logps["chosen"] for reference_logps in expected))) > SIGNIFICANT, expected
    evidence: dict[str, Any] = {"pairs": len(expected[0]["chosen"]), "largest_differences": []}
    for rank in result.values:
        # A body that is given one reference model has asked the last of them.
        expected_of_rank = expected[-len(rank["found"]) :]
        evidence["largest_differences"].append(
            [
                max(max(map(_distance, logps[side], expected_logps[side])) for side in dpo.SIDES)
                for logps, expected_logps in zip(rank["found"], expected_of_rank, strict=True)
            ]
        )
    right = every(
        difference <= TOLERANCE for differences in evidence["largest_differences"] for difference in differences
    )
    return Finding(Verdict.OK if right else Verdict.SILENT, evidence)


def _distance(logp: float, expected: float) -> float:
    return abs(logp - expected)
