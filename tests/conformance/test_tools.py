"""A tool, completions that call it, and what must follow a call."""

from __future__ import annotations

import inspect

import pytest

from pytest_trlcompat.conformance.grpo import tools

PROMPT = [4, 5]
SPOKEN, END = 10, 1
CALL, NAME, ARGUMENT, RESULT, ASSISTANT = (3 + number for number in (50, 51, 52, 53, 54))


def call_of(number: int) -> list[int]:
    return [SPOKEN, CALL, NAME, ARGUMENT, 3 + number, END]


def completion_of(*parts: list[int]) -> tuple[list[int], list[bool]]:
    """Turns of the model and results of the tool by turns."""
    sampled = [index % 2 == 0 for index, part in enumerate(parts) for _ in part]
    return [token for part in parts for token in part], sampled


RIGHT = [RESULT, 3 + 2 * 7, 3 + 2 * 11, END, ASSISTANT]
"""What the tool says to 2."""


def test_of_a_group_completions_call_the_tool_twice_once_wrongly_and_never() -> None:
    turns = [[tools.turn(0, PROMPT, member, 0, number) for number in range(3)] for member in range(4)]
    calls = [[tools.called(turn, [True] * len(turn)) for turn in each] for each in turns]
    assert sorted([len(number) for number in each] for each in calls) == [[0, 0, 0], [1, 0, 0], [1, 0, 0], [1, 1, 0]]
    first = [number for each in calls for number in each[0]]
    assert len([number for number in first if number % 5 == 0]) == 1
    assert all(turn[-1] == END and END not in turn[:-1] for each in turns for turn in each)
    assert tools.turn(0, PROMPT, 0, 0, 0) != tools.turn(1, PROMPT, 0, 0, 0)


def test_the_tool_answers_or_fails_and_says_that_it_was_called() -> None:
    asked: list[int] = []
    tool = tools.tool(asked.append)
    assert tool("w2") == "w14 w22"
    with pytest.raises(ValueError, match="the tool fails"):
        tool("w5")
    assert asked == [2, 5]
    assert list(inspect.signature(tool).parameters) == ["w52"]


def test_calls_and_words_of_a_completion() -> None:
    parts = completion_of(call_of(2), RIGHT, [SPOKEN + 1, END])
    assert (tools.called(*parts), tools.answered(*parts)) == ([2], [2])
    assert tools.words_of(*parts) == [SPOKEN, SPOKEN + 1]
    alone = completion_of(call_of(2))
    assert (tools.called(*alone), tools.answered(*alone)) == ([2], [])
    assert tools.is_continued([*PROMPT, *parts[0]])
    assert not tools.is_continued(PROMPT)


@pytest.mark.parametrize(
    "parts, limit, iterations",
    [
        ([[SPOKEN, END]], 40, None),
        ([call_of(2), RIGHT, [SPOKEN, END]], 40, None),
        ([call_of(2), RIGHT, [SPOKEN, END]], 40, 1),
        ([call_of(2)], 40, 0),
        ([call_of(2)], 8, None),
        ([call_of(5), [RESULT, 2, 2, END, ASSISTANT], [SPOKEN, END]], 40, None),
    ],
    ids=["no call", "a call", "one iteration", "no iteration", "no room", "a failure"],
)
def test_what_follows_a_turn(parts: list[list[int]], limit: int, iterations: int | None) -> None:
    assert tools.differing(*completion_of(*parts), limit, iterations) is None


@pytest.mark.parametrize(
    "parts, iterations, wanted, found",
    [
        ([call_of(2)], None, RIGHT, []),
        ([call_of(2), RIGHT, [SPOKEN, END]], 0, [], RIGHT),
        ([[SPOKEN, END], RIGHT, [SPOKEN, END]], None, [], RIGHT),
        ([call_of(2), [RESULT, 9, 9, END, ASSISTANT], [SPOKEN, END]], None, RIGHT, [RESULT, 9, 9, END, ASSISTANT]),
        ([call_of(2), RIGHT, call_of(2), RIGHT, [SPOKEN, END]], 1, [], RIGHT),
    ],
    ids=["no result", "no iteration", "no call", "another result", "one iteration"],
)
def test_what_must_not_follow_a_turn(
    parts: list[list[int]], iterations: int | None, wanted: list[int], found: list[int]
) -> None:
    assert tools.differing(*completion_of(*parts), 40, iterations) == (wanted, found)
