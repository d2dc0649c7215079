"""The search, held against brute force: any turn, any set of candidates that cannot tell, and noisy answers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pytest_trlcompat.bisect.search import Answer, Ask, Found, Policy, Refusal, Refused, Vote, plan

GOOD, BAD, UNKNOWN = Answer.GOOD, Answer.BAD, Answer.UNKNOWN


def run(count: int, answer: Callable[[int], Vote], policy: Policy) -> tuple[Found | Refused, list[int]]:
    """Ask until there is a result; returns it and the candidates in the order in which they were asked."""
    votes: dict[int, list[Vote]] = {}
    asked: list[int] = []
    while True:
        step = plan(count, votes, policy)
        if not isinstance(step, Ask):
            return step, asked
        assert step.again == (step.index in votes)
        votes.setdefault(step.index, []).append(answer(step.index))
        asked.append(step.index)
        assert len(asked) < 20 * count + 100, "the search does not end"


def world(turn: int, unknown: Collection[int], policy: Policy) -> Callable[[int], Vote]:
    """Candidates before ``turn`` answer as the first, the others as the last."""

    def answer(index: int) -> Vote:
        if index in unknown:
            return Vote(UNKNOWN)
        return Vote(policy.before if index < turn else policy.after)

    return answer


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, int, frozenset[int]]:
    """A number of candidates, the turn, and candidates between the ends that cannot tell: single ones and ranges."""
    count = draw(st.integers(2, 150))
    turn = draw(st.integers(1, count - 1))
    inner = st.integers(1, max(1, count - 2))
    single = draw(st.sets(inner, max_size=count // 3))
    starts = draw(st.lists(st.tuples(inner, st.integers(1, count)), max_size=3))
    ranges = {index for start, length in starts for index in range(start, start + length)}
    return count, turn, frozenset(index for index in single | ranges if 0 < index < count - 1)


@given(worlds(), st.booleans())
@settings(deadline=None, max_examples=300)
@example((2, 1, frozenset()), False)
@example((255, 1, frozenset(range(100, 160))), False)
@example((200, 100, frozenset(range(1, 199))), True)
@example((97, 12, frozenset(range(12, 69))), False)
def test_it_finds_what_brute_force_finds(drawn: tuple[int, int, frozenset[int]], find_fix: bool) -> None:
    count, turn, unknown = drawn
    policy = Policy(find_fix=find_fix)
    found, asked = run(count, world(turn, unknown, policy), policy)
    known = [index for index in range(count) if index not in unknown]
    assert isinstance(found, Found)
    assert found.before == max(index for index in known if index < turn)
    assert found.after == min(index for index in known if index >= turn)
    assert found.confidence == pytest.approx(1.0)
    assert asked[:2] == [0, count - 1]
    assert len(asked) == len(set(asked)), "a certain answer was asked again"
    told = [index for index in asked[2:] if index not in unknown]
    met = [index for index in asked if index in unknown]
    # What cannot tell makes halves uneven, which costs questions; where there is none of it the bound itself holds.
    assert len(told) <= math.ceil(math.log2(count - 1)) * (2 if met else 1)


@given(worlds(), st.booleans())
@settings(deadline=None, max_examples=200)
def test_nothing_outside_of_what_is_left_is_asked(drawn: tuple[int, int, frozenset[int]], find_fix: bool) -> None:
    count, turn, unknown = drawn
    policy = Policy(find_fix=find_fix)
    _, asked = run(count, world(turn, unknown, policy), policy)
    before, after = 0, count - 1
    for index in asked[2:]:
        assert before < index < after
        if index not in unknown:
            before, after = (index, after) if index < turn else (before, index)


@pytest.mark.parametrize("count", [3, 4, 5, 17, 65, 200, 257, 500])
def test_with_answers_from_all_it_asks_no_more_than_the_bound_of_information(count: int) -> None:
    asked = [len(run(count, world(turn, (), Policy()), Policy())[1]) - 2 for turn in range(1, count)]
    assert max(asked) == math.ceil(math.log2(count - 1))
    assert sum(asked) / len(asked) <= math.log2(count - 1) + 0.09  # of a Huffman code over equal weights


def test_isolated_candidates_that_cannot_tell_cost_one_question_each() -> None:
    generator = random.Random(0)
    for _ in range(500):
        count = generator.randrange(100, 300)
        turn = generator.randrange(1, count)
        unknown = {index for index in range(1, count - 1) if generator.random() < 0.05}
        _, asked = run(count, world(turn, unknown, Policy()), Policy())
        skipped = sum(index in unknown for index in asked)
        assert len(asked) - 2 <= math.ceil(math.log2(count - 1)) + skipped


def test_a_wide_range_that_cannot_tell_is_left_in_few_steps() -> None:
    unknown = range(98, 158)
    _, asked = run(256, world(10, unknown, Policy()), Policy())
    assert sum(index in unknown for index in asked) <= 5


def test_it_gives_a_range_when_too_many_cannot_tell() -> None:
    unknown = range(20, 80)
    policy = Policy(max_unknown=6)
    found, asked = run(100, world(50, unknown, policy), policy)
    assert isinstance(found, Found)
    assert found.before < 20 <= 80 <= found.after
    assert sum(index in unknown for index in asked) == 6


@pytest.mark.parametrize(
    "first, last, find_fix, refused",
    [
        (BAD, GOOD, False, Refused(Refusal.SWAPPED)),
        (GOOD, BAD, True, Refused(Refusal.SWAPPED)),
        (GOOD, GOOD, False, Refused(Refusal.BOTH_GOOD, 9)),
        (GOOD, GOOD, True, Refused(Refusal.BOTH_GOOD, 0)),
        (BAD, BAD, False, Refused(Refusal.BOTH_BAD, 0)),
        (BAD, BAD, True, Refused(Refusal.BOTH_BAD, 9)),
        (UNKNOWN, BAD, False, Refused(Refusal.UNKNOWN_END, 0)),
        (GOOD, UNKNOWN, False, Refused(Refusal.UNKNOWN_END, 9)),
    ],
)
def test_ends_that_do_not_answer_as_they_should_are_refused(
    first: Answer, last: Answer, find_fix: bool, refused: Refused
) -> None:
    answers = {0: first, 9: last}
    result, asked = run(10, lambda index: Vote(answers[index]), Policy(find_fix=find_fix))
    assert result == refused
    assert asked == ([0] if first is UNKNOWN else [0, 9])


@pytest.mark.parametrize("count", [0, 1])
def test_one_candidate_is_not_searched(count: int) -> None:
    assert plan(count, {}) == Refused(Refusal.TOO_FEW)


def test_steps_left_count_down() -> None:
    votes: dict[int, list[Vote]] = {}
    left = []
    while isinstance(step := plan(17, votes, Policy()), Ask):
        left.append(step.steps_left)
        votes[step.index] = [Vote(GOOD if step.index < 9 else BAD)]
    assert left == [6, 5, 4, 3, 2, 1]


def test_both_next_questions_are_known_before_the_present_one_is_answered() -> None:
    votes = {0: [Vote(GOOD)], 100: [Vote(BAD)]}
    assert plan(101, votes) == Ask(50, 7)
    assert plan(101, {**votes, 50: [Vote(GOOD)]}) == Ask(75, 6)
    assert plan(101, {**votes, 50: [Vote(BAD)]}) == Ask(25, 6)


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.25])
def test_with_noise_it_is_right_as_often_as_it_says(noise: float) -> None:
    generator = random.Random(1)
    right, claimed, tries = 0, 0.0, 400
    policy = Policy(confidence=0.95, max_votes=60)
    for _ in range(tries):
        count = generator.randrange(5, 80)
        turn = generator.randrange(1, count)

        def answer(index: int, turn: int = turn, last: int = count - 1) -> Vote:
            truth, lie = (GOOD, BAD) if index < turn else (BAD, GOOD)
            # An end that lies is found when the search has come to nothing; here the ends are known.
            wrong = index not in (0, last) and generator.random() < noise
            return Vote(lie if wrong else truth, 1e-6 if index in (0, last) else noise)

        found, _ = run(count, answer, policy)
        assert isinstance(found, Found)
        claimed += found.confidence
        right += found.before < turn <= found.after
    assert claimed / tries >= 0.95
    assert right / tries >= 0.95 - 2 * math.sqrt(0.95 * 0.05 / tries)


def test_one_wrong_answer_is_uncovered_by_asking_again() -> None:
    lies = {50: 1}

    def answer(index: int) -> Vote:
        truth = GOOD if index < 30 else BAD
        if lies.get(index, 0):
            lies[index] -= 1
            truth = GOOD
        return Vote(truth, 0.01)

    found, asked = run(101, answer, Policy(confidence=0.99))
    assert isinstance(found, Found)
    assert (found.before, found.after) == (29, 30)
    assert found.confidence >= 0.99
    assert asked.count(50) >= 2


def test_answers_without_much_doubt_are_not_asked_again() -> None:
    found, asked = run(20, lambda index: Vote(GOOD if index < 7 else BAD, 0.001), Policy())
    assert len(asked) == len(set(asked))
    assert isinstance(found, Found)
    assert 0.98 < found.confidence < 1


def test_a_candidate_that_stays_undecided_cannot_tell() -> None:
    flips = {5: 0}

    def answer(index: int) -> Vote:
        if index == 5:
            flips[5] += 1
            return Vote(GOOD if flips[5] % 2 else BAD, 0.1)
        return Vote(GOOD if index < 5 else BAD, 1e-6)

    found, asked = run(11, answer, Policy(confidence=0.95, max_votes=4))
    assert isinstance(found, Found)
    assert (found.before, found.after) == (4, 6)
    assert asked.count(5) == 4
