"""What the tests of the judge let it judge."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from pytest_trlcompat.launch import Failure, LaunchError, LaunchResult, RankResult
from pytest_trlcompat.plugin.judging import Finding

ISSUE = "grpo-fsdp-ref-model"


def failed(failure: Failure | None, timed_out: bool = False) -> LaunchError:
    ranks = (RankResult(rank=0, failure=failure, exit_status=1),)
    return LaunchError("the launch failed", LaunchResult("train", "fsdp1", "software", ranks, timed_out))


@contextlib.contextmanager
def nothing_skipped() -> Iterator[None]:
    """A judge that skips would skip the test of it as well, where it is to fail."""
    try:
        yield
    except pytest.skip.Exception as skipped:
        raise LookupError(f"skipped: {skipped}") from None


def raising(error: Exception) -> Finding:
    raise error
