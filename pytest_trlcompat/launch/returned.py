"""What the ranks of a launch have reported, as the test process gets it."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from dataclasses import replace

from pytest_trlcompat.launch import proof
from pytest_trlcompat.launch.messages import RankOutcome, RankReport
from pytest_trlcompat.launch.result import Failure, RankResult

__all__ = ["of_one_accord", "rank_result"]


def rank_result(report: RankReport, first: int) -> RankResult:
    """The result of one rank; a value that cannot be read here is a failure of that rank.

    Args:
        first: the number of the first rank of this machine.
    """
    outcome = report.outcome or RankOutcome(returned=False, ended_at=report.ended_at)
    value, failure = None, outcome.failure
    try:
        value = None if outcome.value is None else pickle.loads(outcome.value)  # noqa: S301 - of a rank
    except Exception as error:
        failure = _unreadable(error)
    return RankResult(
        rank=first + report.rank,
        value=value,
        failure=failure,
        exit_status=report.exit_status,
        ended_by_launcher=report.ended_by_launcher,
        stdout=report.stdout,
        stderr=report.stderr,
        seconds=report.seconds,
        ended_at=report.ended_at,
        peak_bytes=report.peak_bytes,
        peak_accelerator_bytes=outcome.peak_accelerator_bytes,
        returned=outcome.returned,
        proof=dict(outcome.proof),
        warned=outcome.warned,
        records=tuple({**record, "rank": first + report.rank} for record in outcome.records),
    )


def of_one_accord(ranks: Sequence[RankResult]) -> list[RankResult]:
    """The ranks; if all succeeded but built different engines, one of them is made a failure."""
    # A rank whose function failed has its own error, and may have built fewer.
    if not all(rank.ok for rank in ranks):
        return list(ranks)
    difference = proof.disagreement({rank.rank: rank.proof for rank in ranks})
    if difference is None:
        return list(ranks)
    at_fault, text = difference
    mro = tuple(base.__name__ for base in proof.NotProved.__mro__)
    failure = Failure(proof.NotProved.__name__, text, f"{proof.NotProved.__module__}.{mro[0]}: {text}", mro)
    return [replace(rank, failure=failure) if rank.rank == at_fault else rank for rank in ranks]


def _unreadable(error: Exception) -> Failure:
    message = f"the function's result cannot be unpickled in the test process: {type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    return Failure(
        type(error).__name__, message, f"{trace}{message}", tuple(base.__name__ for base in type(error).__mro__)
    )
