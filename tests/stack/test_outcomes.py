"""One rank of two ends a test, while the other waits for it or fails for a reason of its own."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_trlcompat.launch import Launcher, LaunchError

from .launch_bodies import all_reduce, meet


def skip_first(then: Any) -> Any:
    rank, _ = meet()
    if rank == 0:
        pytest.skip("rank 0 has seen enough")
    return then()


def complain() -> None:
    raise ValueError("a reason of its own")


def test_a_rank_that_waited_for_one_that_skips_is_no_failure(launcher: Launcher) -> None:
    with pytest.raises(pytest.skip.Exception, match="^rank 0 has seen enough$"):
        launcher(skip_first, all_reduce, strategy="ddp", sharded=False)


def test_a_failure_counts_more_than_a_skip(launcher: Launcher) -> None:
    with pytest.raises(LaunchError, match="ValueError: a reason of its own") as caught:
        launcher(skip_first, complain, strategy="ddp", sharded=False)
    assert caught.value.result is not None
    assert [rank.failure and rank.failure.type_name for rank in caught.value.result.ranks] == ["Skipped", "ValueError"]
    with pytest.raises(ValueError, match="^a reason of its own$"):
        launcher(skip_first, complain, strategy="ddp", sharded=False, raises="original")
