"""The search: which candidate to test next, given the answers so far.

:func:`plan` is a function of the answers and nothing else. So an interrupted search goes on from the answers that were
kept. Both candidates that may come next are known before the present one has been tested: plan again with either
answer filled in.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["Answer", "Found", "InvalidRange", "NextTest", "Plan", "Policy", "RangeProblem", "Vote", "plan"]


class Answer(str, Enum):
    """Whether a candidate is good or bad."""

    GOOD = "good"
    BAD = "bad"
    INCONCLUSIVE = "inconclusive"
    """What git calls skip."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Vote:
    """The answer of one run of one candidate.

    Attributes:
        doubt: probability that the opposite is true, below one half.
    """

    answer: Answer
    doubt: float = 0.0


@dataclass(frozen=True)
class Policy:
    """What is searched for, and with which confidence.

    Attributes:
        find_fix: the first good candidate after bad ones, instead of the first bad after good ones.
        confidence: the probability at which the search ends; below it, doubtful candidates are tested again.
        max_votes: how often one candidate is tested at most; one that is undecided then counts as inconclusive.
        max_inconclusive: how many candidates of the remaining range may be inconclusive before the search gives the
            range instead of one candidate; ``None``: all of them.
    """

    find_fix: bool = False
    confidence: float = 0.9
    max_votes: int = 9
    max_inconclusive: int | None = None

    @property
    def before(self) -> Answer:
        """The answer of the first candidate."""
        return Answer.BAD if self.find_fix else Answer.GOOD

    @property
    def after(self) -> Answer:
        """The answer of the last candidate."""
        return Answer.GOOD if self.find_fix else Answer.BAD


class RangeProblem(Enum):
    """Why a range cannot be searched."""

    TOO_FEW = "fewer than two candidates"
    SWAPPED = "good and bad are swapped"
    BOTH_GOOD = "both ends are good"
    BOTH_BAD = "both ends are bad"
    INCONCLUSIVE_END = "an end is inconclusive"


@dataclass(frozen=True)
class NextTest:
    """Test this candidate next.

    Attributes:
        steps_left: about how many tests there will be, this one among them.
        again: it was tested before, and its answer is doubtful.
    """

    index: int
    steps_left: int
    again: bool = False


@dataclass(frozen=True)
class Found:
    """The answer changes after ``before``, and at ``after`` at the latest.

    Attributes:
        before: the last candidate known to answer as the first one does.
        after: the first candidate known to answer as the last one does. Candidates between the two are inconclusive.
        confidence: probability that it is so, given the doubt in the answers.
    """

    before: int
    after: int
    confidence: float


@dataclass(frozen=True)
class InvalidRange:
    """The ends do not answer as they should.

    Attributes:
        index: the end to blame, where it is one.
    """

    problem: RangeProblem
    index: int | None = None


Plan = NextTest | Found | InvalidRange


def plan(count: int, votes: Mapping[int, Sequence[Vote]], policy: Policy = Policy()) -> Plan:
    """What to do next about ``count`` ordered candidates.

    Both ends are tested first. Then each test halves the candidates that are left, away from inconclusive ones. With
    answers free of doubt no candidate is tested twice, and at most ``ceil(log2(count - 1))`` candidates between the
    ends turn out good or bad, unless the search has to leave a range of inconclusive candidates, which costs one more.

    Args:
        votes: for each candidate that was tested, its answers.
    """
    if count < 2:
        return InvalidRange(RangeProblem.TOO_FEW)
    answers = {index: settle(of_candidate, policy) for index, of_candidate in votes.items() if of_candidate}
    # Votes that cancel out are settled before the range is narrowed any further.
    for index, answer in sorted(answers.items()):
        if answer is None:
            return NextTest(index, _steps(count - 2) + 1, again=True)
    # Without two ends that differ the answers between them mean nothing.
    ends = _check_ends(count, answers, policy)
    if ends is not None:
        return ends
    before, after = _bracket(count, votes, answers, policy)
    untested = [index for index in range(before + 1, after) if index not in answers]
    inconclusive = [index for index in range(before + 1, after) if answers.get(index) is Answer.INCONCLUSIVE]
    if untested and (policy.max_inconclusive is None or len(inconclusive) < policy.max_inconclusive):
        conclusive = sum(answer is not Answer.INCONCLUSIVE for answer in answers.values()) - 2
        # What is unspent of the bound may be spent on keeping away from inconclusive candidates.
        budget = max(_steps(count - 2) - conclusive, _steps(len(untested)))
        return NextTest(_most_informative(after - before, untested, inconclusive, budget), _steps(len(untested)))
    return _confirm(count, votes, before, after, policy)


def settle(votes: Sequence[Vote], policy: Policy) -> Answer | None:
    """The answer that a candidate's votes amount to; ``None`` where it must be tested again."""
    conclusive = [vote for vote in votes if vote.answer is not Answer.INCONCLUSIVE]
    if not conclusive:
        return Answer.INCONCLUSIVE
    weight = sum(_weight(vote.doubt) * (1 if vote.answer is Answer.GOOD else -1) for vote in conclusive)
    if abs(weight) > 1e-9:
        return Answer.GOOD if weight > 0 else Answer.BAD
    return Answer.INCONCLUSIVE if len(conclusive) >= policy.max_votes else None


def _weight(doubt: float) -> float:
    """Logarithm of the odds that a vote is right."""
    # The logarithm stays finite for a vote without doubt, and positive for one that is worth next to nothing.
    doubt = min(max(doubt, 1e-12), 0.499)
    return math.log((1 - doubt) / doubt)


def _steps(candidates: int) -> int:
    """Tests that distinguish ``candidates + 1`` positions of the change."""
    return candidates.bit_length()


def _check_ends(count: int, answers: Mapping[int, Answer | None], policy: Policy) -> Plan | None:
    """The test of an end that was not tested, or why the ends will not do; ``None`` when they are right."""
    first, last = answers.get(0), answers.get(count - 1)
    for index, answer in ((0, first), (count - 1, last)):
        if answer is Answer.INCONCLUSIVE:
            return InvalidRange(RangeProblem.INCONCLUSIVE_END, index)
    if first is None or last is None:
        return NextTest(0 if first is None else count - 1, _steps(count - 2) + (2 if first is last else 1))
    if (first, last) == (policy.before, policy.after):
        return None
    if first is not last:
        return InvalidRange(RangeProblem.SWAPPED)
    if first is Answer.GOOD:
        return InvalidRange(RangeProblem.BOTH_GOOD, 0 if policy.find_fix else count - 1)
    return InvalidRange(RangeProblem.BOTH_BAD, count - 1 if policy.find_fix else 0)


def _bracket(
    count: int, votes: Mapping[int, Sequence[Vote]], answers: Mapping[int, Answer | None], policy: Policy
) -> tuple[int, int]:
    """The two neighbouring answers between which the change most likely lies."""
    likelihoods = _likelihoods(count, votes, policy)
    # From 1 on: both ends answer as they should, or the search would have ended.
    change = max(range(1, count), key=lambda position: likelihoods[position])
    before = max(index for index, answer in answers.items() if answer is policy.before and index < change)
    after = min(index for index, answer in answers.items() if answer is policy.after and index >= change)
    return before, after


def _likelihoods(count: int, votes: Mapping[int, Sequence[Vote]], policy: Policy) -> list[float]:
    """The logarithm of the votes' probability for each position of the change: the first candidate after it.

    At position 0 and at position ``count`` nothing changes, and an end has answered wrongly.
    """
    steps = [0.0] * count
    for index, of_candidate in votes.items():
        for vote in of_candidate:
            if vote.answer is not Answer.INCONCLUSIVE:
                # A change later than this candidate makes a vote for "before" right.
                steps[index] += _weight(vote.doubt) * (1 if vote.answer is policy.before else -1)
    return list(itertools.accumulate(steps, initial=0.0))


def _most_informative(width: int, untested: Sequence[int], inconclusive: Sequence[int], budget: int) -> int:
    """The untested candidate that divides the range best, weighed by its chance of an answer.

    Args:
        width: of the range in which the change lies.
        inconclusive: those of the range, in order.
        budget: tests that may still turn out good or bad.
    """
    count = len(untested)
    if not inconclusive:
        return untested[(count - 1) // 2]
    half = 1 << (budget - 1)
    # A neighbour of an inconclusive candidate is probably inconclusive too (a range of releases that cannot be built),
    # and the more of them were met, the further away one has to go.
    # The distance doubles with each inconclusive candidate, and never exceeds a quarter of the range.
    reach = min(2.0 ** (len(inconclusive) - 1), max(1.0, width / 4))

    def chance(rank: int) -> float:
        position = bisect.bisect(inconclusive, untested[rank])
        neighbours = inconclusive[max(0, position - 1) : position + 1]
        return 1.0 - 2.0 ** (-min(abs(untested[rank] - index) for index in neighbours) / reach)

    def information(rank: int) -> tuple[float, float]:
        return chance(rank) * _entropy((rank + 1) / (count + 1)), -abs(rank - (count - 1) / 2)

    # Within these ranks the budget suffices whatever the answer is.
    balanced = [rank for rank in range(count) if rank < half and count - 1 - rank < half]
    best = max(balanced, key=information)
    # Probably inconclusive again: one extra test is cheaper than the whole range.
    if chance(best) < 0.25:
        best = max(range(count), key=information)
    return untested[best]


def _entropy(share: float) -> float:
    return -sum(part * math.log2(part) for part in (share, 1 - share) if part > 0)


def _confirm(
    count: int, votes: Mapping[int, Sequence[Vote]], before: int, after: int, policy: Policy
) -> NextTest | Found:
    """The result, or the more doubtful of its two ends once more."""
    likelihoods = _likelihoods(count, votes, policy)
    # Subtracted before exp(), which would underflow to 0 for many votes.
    top = max(likelihoods)
    mass = [math.exp(value - top) for value in likelihoods]
    total = sum(mass)
    confidence = sum(mass[before + 1 : after + 1]) / total
    if confidence < policy.confidence:
        # Any single wrong answer makes the search close in on that answer, so it is one of the two ends: testing these
        # again is enough to uncover it.
        doubtful = [(sum(mass[: before + 1]), before), (sum(mass[after + 1 :]), after)]
        for _, index in sorted(doubtful, reverse=True):
            if len(votes[index]) < policy.max_votes:
                return NextTest(index, 1, again=True)
    return Found(before, after, confidence)
