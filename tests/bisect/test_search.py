"""The search, compared with brute force: any change, any set of inconclusive candidates, and noisy answers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pytest_trlcompat.bisect.search import Answer, Found, InvalidRange, NextTest, Policy, RangeProblem, Vote, plan

GOOD, BAD, INCONCLUSIVE = Answer.GOOD, Answer.BAD, Answer.INCONCLUSIVE


def run(count: int, answer: Callable[[int], Vote], policy: Policy) -> tuple[Found | InvalidRange, list[int]]:
    """Test until there is a result; returns it and the candidates in the order in which they were tested."""
    votes: dict[int, list[Vote]] = {}
    tested: list[int] = []
    while True:
        step = plan(count, votes, policy)
        if not isinstance(step, NextTest):
            return step, tested
        assert step.again == (step.index in votes)
        votes.setdefault(step.index, []).append(answer(step.index))
        tested.append(step.index)
        assert len(tested) < 20 * count + 100, "the search does not end"


def history(change: int, inconclusive: Collection[int], policy: Policy) -> Callable[[int], Vote]:
    """Candidates before ``change`` answer as the first, the others as the last."""

    def answer(index: int) -> Vote:
        if index in inconclusive:
            return Vote(INCONCLUSIVE)
        return Vote(policy.before if index < change else policy.after)

    return answer


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, frozenset[int]]:
    """A number of candidates, the change, and inconclusive candidates between the ends: single ones and ranges."""
    count = draw(st.integers(2, 150))
    change = draw(st.integers(1, count - 1))
    inner = st.integers(1, max(1, count - 2))
    single = draw(st.sets(inner, max_size=count // 3))
    starts = draw(st.lists(st.tuples(inner, st.integers(1, count)), max_size=3))
    ranges = {index for start, length in starts for index in range(start, start + length)}
    return count, change, frozenset(index for index in single | ranges if 0 < index < count - 1)


@given(histories(), st.booleans())
@settings(deadline=None, max_examples=300)
@example((2, 1, frozenset()), False)
@example((255, 1, frozenset(range(100, 160))), False)
@example((200, 100, frozenset(range(1, 199))), True)
@example((97, 12, frozenset(range(12, 69))), False)
def test_the_search_finds_what_brute_force_finds(drawn: tuple[int, int, frozenset[int]], find_fix: bool) -> None:
    count, change, inconclusive = drawn
    policy = Policy(find_fix=find_fix)
    found, tested = run(count, history(change, inconclusive, policy), policy)
    known = [index for index in range(count) if index not in inconclusive]
    assert isinstance(found, Found)
    assert found.before == max(index for index in known if index < change)
    assert found.after == min(index for index in known if index >= change)
    assert found.confidence == pytest.approx(1.0)
    assert tested[:2] == [0, count - 1]
    assert len(tested) == len(set(tested)), "a candidate with a certain answer was tested again"
    conclusive = [index for index in tested[2:] if index not in inconclusive]
    met = [index for index in tested if index in inconclusive]
    # Inconclusive candidates make the halves uneven, which costs tests; without any, the bound itself holds.
    assert len(conclusive) <= math.ceil(math.log2(count - 1)) * (2 if met else 1)


@given(histories(), st.booleans())
@settings(deadline=None, max_examples=200)
def test_nothing_outside_of_the_remaining_range_is_tested(
    drawn: tuple[int, int, frozenset[int]], find_fix: bool
) -> None:
    count, change, inconclusive = drawn
    policy = Policy(find_fix=find_fix)
    _, tested = run(count, history(change, inconclusive, policy), policy)
    before, after = 0, count - 1
    for index in tested[2:]:
        assert before < index < after
        if index not in inconclusive:
            before, after = (index, after) if index < change else (before, index)


@pytest.mark.parametrize("count", [3, 4, 5, 17, 65, 200, 257, 500])
def test_without_inconclusive_candidates_it_tests_no_more_than_the_information_bound(count: int) -> None:
    tested = [len(run(count, history(change, (), Policy()), Policy())[1]) - 2 for change in range(1, count)]
    assert max(tested) == math.ceil(math.log2(count - 1))
    assert sum(tested) / len(tested) <= math.log2(count - 1) + 0.09  # of a Huffman code over equal weights


def test_isolated_inconclusive_candidates_cost_one_test_each() -> None:
    generator = random.Random(0)
    for _ in range(500):
        count = generator.randrange(100, 300)
        change = generator.randrange(1, count)
        inconclusive = {index for index in range(1, count - 1) if generator.random() < 0.05}
        _, tested = run(count, history(change, inconclusive, Policy()), Policy())
        skipped = sum(index in inconclusive for index in tested)
        assert len(tested) - 2 <= math.ceil(math.log2(count - 1)) + skipped


def test_a_wide_inconclusive_range_is_left_in_few_steps() -> None:
    inconclusive = range(98, 158)
    _, tested = run(256, history(10, inconclusive, Policy()), Policy())
    assert sum(index in inconclusive for index in tested) <= 5


def test_it_gives_a_range_when_too_many_are_inconclusive() -> None:
    inconclusive = range(20, 80)
    policy = Policy(max_inconclusive=6)
    found, tested = run(100, history(50, inconclusive, policy), policy)
    assert isinstance(found, Found)
    assert found.before < 20 <= 80 <= found.after
    assert sum(index in inconclusive for index in tested) == 6


@pytest.mark.parametrize(
    "first, last, find_fix, refused",
    [
        (BAD, GOOD, False, InvalidRange(RangeProblem.SWAPPED)),
        (GOOD, BAD, True, InvalidRange(RangeProblem.SWAPPED)),
        (GOOD, GOOD, False, InvalidRange(RangeProblem.BOTH_GOOD, 9)),
        (GOOD, GOOD, True, InvalidRange(RangeProblem.BOTH_GOOD, 0)),
        (BAD, BAD, False, InvalidRange(RangeProblem.BOTH_BAD, 0)),
        (BAD, BAD, True, InvalidRange(RangeProblem.BOTH_BAD, 9)),
        (INCONCLUSIVE, BAD, False, InvalidRange(RangeProblem.INCONCLUSIVE_END, 0)),
        (GOOD, INCONCLUSIVE, False, InvalidRange(RangeProblem.INCONCLUSIVE_END, 9)),
    ],
)
def test_ends_that_do_not_answer_as_they_should_are_refused(
    first: Answer, last: Answer, find_fix: bool, refused: InvalidRange
) -> None:
    answers = {0: first, 9: last}
    result, tested = run(10, lambda index: Vote(answers[index]), Policy(find_fix=find_fix))
    assert result == refused
    assert tested == ([0] if first is INCONCLUSIVE else [0, 9])


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_candidates_are_not_searched(count: int) -> None:
    assert plan(count, {}) == InvalidRange(RangeProblem.TOO_FEW)


def test_steps_left_count_down() -> None:
    votes: dict[int, list[Vote]] = {}
    left = []
    while isinstance(step := plan(17, votes, Policy()), NextTest):
        left.append(step.steps_left)
        votes[step.index] = [Vote(GOOD if step.index < 9 else BAD)]
    assert left == [6, 5, 4, 3, 2, 1]


def test_both_next_candidates_are_known_before_the_present_answer() -> None:
    votes = {0: [Vote(GOOD)], 100: [Vote(BAD)]}
    assert plan(101, votes) == NextTest(50, 7)
    assert plan(101, {**votes, 50: [Vote(GOOD)]}) == NextTest(75, 6)
    assert plan(101, {**votes, 50: [Vote(BAD)]}) == NextTest(25, 6)


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.25])
def test_with_noise_it_is_right_as_often_as_its_confidence_says(noise: float) -> None:
    generator = random.Random(1)
    right, claimed, tries = 0, 0.0, 400
    policy = Policy(confidence=0.95, max_votes=60)
    for _ in range(tries):
        count = generator.randrange(5, 80)
        change = generator.randrange(1, count)

        def answer(index: int, change: int = change, last: int = count - 1) -> Vote:
            truth, opposite = (GOOD, BAD) if index < change else (BAD, GOOD)
            # The ends are certain here; a wrong answer of an end is found when the search fails.
            wrong = index not in (0, last) and generator.random() < noise
            return Vote(opposite if wrong else truth, 1e-6 if index in (0, last) else noise)

        found, _ = run(count, answer, policy)
        assert isinstance(found, Found)
        claimed += found.confidence
        right += found.before < change <= found.after
    assert claimed / tries >= 0.95
    assert right / tries >= 0.95 - 2 * math.sqrt(0.95 * 0.05 / tries)


def test_one_wrong_answer_is_uncovered_by_testing_again() -> None:
    wrong_answers = {50: 1}

    def answer(index: int) -> Vote:
        truth = GOOD if index < 30 else BAD
        if wrong_answers.get(index, 0):
            wrong_answers[index] -= 1
            truth = GOOD
        return Vote(truth, 0.01)

    found, tested = run(101, answer, Policy(confidence=0.99))
    assert isinstance(found, Found)
    assert (found.before, found.after) == (29, 30)
    assert found.confidence >= 0.99
    assert tested.count(50) >= 2


def test_candidates_without_much_doubt_are_not_tested_again() -> None:
    found, tested = run(20, lambda index: Vote(GOOD if index < 7 else BAD, 0.001), Policy())
    assert len(tested) == len(set(tested))
    assert isinstance(found, Found)
    assert 0.98 < found.confidence < 1


def test_a_candidate_that_stays_undecided_is_inconclusive() -> None:
    flips = {5: 0}

    def answer(index: int) -> Vote:
        if index == 5:
            flips[5] += 1
            return Vote(GOOD if flips[5] % 2 else BAD, 0.1)
        return Vote(GOOD if index < 5 else BAD, 1e-6)

    found, tested = run(11, answer, Policy(confidence=0.95, max_votes=4))
    assert isinstance(found, Found)
    assert (found.before, found.after) == (4, 6)
    assert tested.count(5) == 4
