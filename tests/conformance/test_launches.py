"""Several trainings in as few launches as it takes, whatever becomes of one: what a launch's result says of each."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest

from pytest_trlcompat.conformance import sequential
from pytest_trlcompat.launch import LaunchError, LaunchResult
from pytest_trlcompat.launch.result import Failure, RankResult
from suites.launches import Turns

NAMES = ("one", "two", "three")
CLOSED = "RuntimeError: Connection closed by peer"


def found(*names: str, **failures: str) -> dict[str, Any]:
    """What a rank has of trainings; those with a failure are the ones that ranks ended differently."""
    every: dict[str, Any] = {name: {"failure": None} for name in names}
    return every | {name: {"failure": text, sequential.FAILED_ON: [1]} for name, text in failures.items()}


def returned(rank: int, value: dict[str, Any]) -> RankResult:
    return RankResult(rank, value, returned=True)


def left_alone(rank: int, value: dict[str, Any]) -> RankResult:
    error = sequential.RankDesynchronised([*value][-1], value)
    failure = Failure("RankDesynchronised", str(error), "", pickled=pickle.dumps(error))
    return RankResult(rank, failure=failure, exit_status=1)


def ended(rank: int, *begun: str, raised: str = "", by_launcher: bool = True, at: float = 0.0) -> RankResult:
    """Of a rank without an answer, which printed what it began."""
    said = "".join(f"{sequential.BEGINS}{name}\nsomething else\n" if name else f"{sequential.ENDS}\n" for name in begun)
    failure = Failure(raised, "planted", "") if raised else None
    why = None if failure or not by_launcher else "another rank had failed"
    return RankResult(rank, failure=failure, exit_status=-9, ended_by_launcher=why, stderr=said, ended_at=at)


def tried(*results: tuple[RankResult, ...], timed_out: bool = False) -> tuple[dict[str, Any], list[Sequence[str]]]:
    """What becomes of :data:`NAMES` with these results, and what was launched."""
    asked: list[Sequence[str]] = []
    turns = Turns(NAMES)
    for names in turns:
        asked.append(list(names))
        first = len(asked) == 1
        turns.judge(LaunchResult("hold", "ddp", "software", results[len(asked) - 1], timed_out=timed_out and first))
    assert set(turns.tried) == set(NAMES)
    return turns.tried, asked


def failures(every: dict[str, Any]) -> dict[str, list[str | None]]:
    return {name: [rank["failure"] for rank in every[name].ranks] for name in NAMES}


def test_ranks_that_end_all_trainings_alike_need_one_launch() -> None:
    every, asked = tried((returned(0, found(*NAMES)), returned(1, found(*NAMES))))
    assert asked == [list(NAMES)]
    assert failures(every) == {name: [None, None] for name in NAMES}


@pytest.mark.parametrize("freed", [returned(0, found("one", two="ValueError: x")), ended(0, "one", "two")])
def test_a_rank_that_was_left_alone_says_what_its_training_ended_in(freed: RankResult) -> None:
    is_killed = not freed.returned
    again = found("one", "three") if is_killed else found("three")
    first = (freed, left_alone(1, found("one", two="ValueError: x")))
    every, asked = tried(first, (returned(0, again), returned(1, again)))
    assert asked == [list(NAMES), [*again]]
    assert set(failures(every)["two"]) == {"ValueError: x"}
    assert failures(every)["three"] == [None, None]
    assert every["one"].ranks[0]["failure"] is None


def test_the_first_rank_has_its_answers_where_it_was_left_alone() -> None:
    first = (left_alone(0, found("one", two="ValueError: x")), ended(1, "one", "two"))
    every, asked = tried(first, (returned(0, found("three")), returned(1, found("three"))))
    assert asked == [list(NAMES), ["three"]]
    assert failures(every) == {"one": [None], "two": ["ValueError: x"], "three": [None, None]}


@pytest.mark.parametrize("other", [ended(0, "one", "two"), left_alone(0, found("one", two=CLOSED))])
def test_a_rank_that_died_is_what_its_training_ended_in(other: RankResult) -> None:
    again = found("one", "three")
    dead = ended(1, "one", "two", by_launcher=False, at=-1.0)
    every, asked = tried((other, dead), (returned(0, again), returned(1, again)))
    assert asked == [list(NAMES), ["one", "three"]]
    assert (every["two"].ranks, "killed by SIGKILL" in str(every["two"].error)) == ((), True)
    assert str(every["two"].error).endswith("rank 1 was in 'two'")


def test_a_launch_that_hangs_is_of_the_training_in_which_its_slowest_rank_is() -> None:
    again = found("one", "three")
    hung = (ended(0, "one", "two", "three"), ended(1, "one", "two", at=1.0))
    every, asked = tried(hung, (returned(0, again), returned(1, again)), timed_out=True)
    assert asked == [list(NAMES), ["one", "three"]]
    assert str(every["two"].error).endswith("rank 0 was in 'three'\nrank 1 was in 'two'")


def test_what_the_first_rank_raises_when_it_compares_is_of_that_training() -> None:
    again = found("two", "three")
    first = (ended(0, "one", raised="ZeroDivisionError"), ended(1, "one", "two"))
    every, asked = tried(first, (returned(0, again), returned(1, again)))
    assert asked == [list(NAMES), ["two", "three"]]
    assert "rank 0 raised ZeroDivisionError" in str(every["one"].error)


@pytest.mark.parametrize("begun", [(), ("one", "two", "three", "")])
def test_what_fails_before_the_first_training_or_after_the_last_is_of_none(begun: tuple[str, ...]) -> None:
    with pytest.raises(LaunchError, match="raised AssertionError"):
        tried((returned(0, found(*NAMES)), ended(1, *begun, raised="AssertionError")))
