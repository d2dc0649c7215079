"""The search: which candidate to ask next, given what was answered so far. Pure; imports the standard library alone.

:func:`plan` is a function of the answers and nothing else. A search that was interrupted goes on by handing it the
answers that were kept, and both possible next questions are known before the present one is answered: ask it with
either answer filled in.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["Answer", "Ask", "Found", "Plan", "Policy", "Refusal", "Refused", "Vote", "plan", "settle"]


class Answer(str, Enum):
    """What a candidate says."""

    GOOD = "good"
    BAD = "bad"
    UNKNOWN = "cannot tell"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Vote:
    """One answer of one candidate.

    Attributes:
        doubt: probability that the opposite is true, below one half.
    """

    answer: Answer
    doubt: float = 0.0


@dataclass(frozen=True)
class Policy:
    """What is searched, and how sure one has to be.

    Attributes:
        find_fix: the first good candidate after bad ones, instead of the first bad after good ones.
        confidence: the probability at which the search ends; below it, doubtful answers are asked again.
        max_votes: how often one candidate is asked at most; one that is undecided then counts as cannot tell.
        max_unknown: how many candidates between the two ends in force may fail to tell before the search gives the
            range instead of one candidate; ``None``: all of them.
    """

    find_fix: bool = False
    confidence: float = 0.9
    max_votes: int = 9
    max_unknown: int | None = None

    @property
    def before(self) -> Answer:
        """The answer of the first candidate."""
        return Answer.BAD if self.find_fix else Answer.GOOD

    @property
    def after(self) -> Answer:
        """The answer of the last candidate."""
        return Answer.GOOD if self.find_fix else Answer.BAD


class Refusal(Enum):
    """Why there is nothing to search."""

    TOO_FEW = "fewer than two candidates"
    SWAPPED = "good and bad are swapped"
    BOTH_GOOD = "both ends are good"
    BOTH_BAD = "both ends are bad"
    UNKNOWN_END = "an end cannot tell"


@dataclass(frozen=True)
class Ask:
    """Ask this candidate next.

    Attributes:
        steps_left: about how many questions there will be, this one among them.
        again: it was asked before, and its answer is doubtful.
    """

    index: int
    steps_left: int
    again: bool = False


@dataclass(frozen=True)
class Found:
    """The turn lies after ``before`` and not after ``after``.

    Attributes:
        before: the last candidate known to answer as the first one does.
        after: the first candidate known to answer as the last one does. Candidates between the two cannot tell.
        confidence: probability that it is so, given the doubt in the answers.
    """

    before: int
    after: int
    confidence: float


@dataclass(frozen=True)
class Refused:
    """The ends do not answer as they should.

    Attributes:
        index: the end to blame, where it is one.
    """

    why: Refusal
    index: int | None = None


Plan = Ask | Found | Refused


def plan(count: int, votes: Mapping[int, Sequence[Vote]], policy: Policy = Policy()) -> Plan:
    """What to do next about ``count`` ordered candidates.

    Both ends are asked first. Then each question halves the candidates that can still be asked, away from those that
    could not tell. With answers free of doubt no candidate is asked twice, and at most ``ceil(log2(count - 1))``
    questions between the ends are answered good or bad, unless the search has to leave a range of candidates that
    cannot tell, which costs one more.

    Args:
        votes: for each candidate that was asked, its answers.
    """
    if count < 2:
        return Refused(Refusal.TOO_FEW)
    answers = {index: settle(given, policy) for index, given in votes.items() if given}
    for index, answer in sorted(answers.items()):
        if answer is None:
            return Ask(index, _steps(count - 2) + 1, again=True)
    ends = _ends(count, answers, policy)
    if ends is not None:
        return ends
    before, after = _bracket(count, votes, answers, policy)
    open_ones = [index for index in range(before + 1, after) if index not in answers]
    unknown = [index for index in range(before + 1, after) if answers.get(index) is Answer.UNKNOWN]
    if open_ones and (policy.max_unknown is None or len(unknown) < policy.max_unknown):
        told = sum(answer is not Answer.UNKNOWN for answer in answers.values()) - 2
        # What is unspent of the bound may be spent on keeping away from candidates that cannot tell.
        budget = max(_steps(count - 2) - told, _steps(len(open_ones)))
        return Ask(_next(after - before, open_ones, unknown, budget), _steps(len(open_ones)))
    return _confirm(count, votes, before, after, policy)


def settle(votes: Sequence[Vote], policy: Policy) -> Answer | None:
    """The answer that a candidate's votes amount to; ``None`` where it must be asked again."""
    telling = [vote for vote in votes if vote.answer is not Answer.UNKNOWN]
    if not telling:
        return Answer.UNKNOWN
    weight = sum(_weight(vote.doubt) * (1 if vote.answer is Answer.GOOD else -1) for vote in telling)
    if abs(weight) > 1e-9:
        return Answer.GOOD if weight > 0 else Answer.BAD
    return Answer.UNKNOWN if len(telling) >= policy.max_votes else None


def _weight(doubt: float) -> float:
    """Logarithm of the odds that a vote is right."""
    doubt = min(max(doubt, 1e-12), 0.499)
    return math.log((1 - doubt) / doubt)


def _steps(candidates: int) -> int:
    """Questions that tell one of ``candidates + 1`` places apart."""
    return candidates.bit_length()


def _ends(count: int, answers: Mapping[int, Answer | None], policy: Policy) -> Plan | None:
    """The question for an end that was not asked, or why the ends will not do; ``None`` when they are right."""
    first, last = answers.get(0), answers.get(count - 1)
    for index, answer in ((0, first), (count - 1, last)):
        if answer is Answer.UNKNOWN:
            return Refused(Refusal.UNKNOWN_END, index)
    if first is None or last is None:
        return Ask(0 if first is None else count - 1, _steps(count - 2) + (2 if first is last else 1))
    if (first, last) == (policy.before, policy.after):
        return None
    if first is not last:
        return Refused(Refusal.SWAPPED)
    if first is Answer.GOOD:
        return Refused(Refusal.BOTH_GOOD, 0 if policy.find_fix else count - 1)
    return Refused(Refusal.BOTH_BAD, count - 1 if policy.find_fix else 0)


def _bracket(
    count: int, votes: Mapping[int, Sequence[Vote]], answers: Mapping[int, Answer | None], policy: Policy
) -> tuple[int, int]:
    """The two neighbouring answers between which the turn most likely lies."""
    likely = _likelihoods(count, votes, policy)
    turn = max(range(1, count), key=lambda place: likely[place])
    before = max(index for index, answer in answers.items() if answer is policy.before and index < turn)
    after = min(index for index, answer in answers.items() if answer is policy.after and index >= turn)
    return before, after


def _likelihoods(count: int, votes: Mapping[int, Sequence[Vote]], policy: Policy) -> list[float]:
    """For each place of the turn (the index of the first candidate after it), the logarithm of the votes' probability.

    At place 0 and at place ``count`` nothing turns, and an end has lied.
    """
    steps = [0.0] * count
    for index, given in votes.items():
        for vote in given:
            if vote.answer is not Answer.UNKNOWN:
                # A turn later than this candidate makes a vote for "before" right.
                steps[index] += _weight(vote.doubt) * (1 if vote.answer is policy.before else -1)
    return list(itertools.accumulate(steps, initial=0.0))


def _next(width: int, open_ones: Sequence[int], unknown: Sequence[int], budget: int) -> int:
    """The candidate that tells most, judged by how it divides the open ones and by how likely it can tell at all.

    A neighbour of one that cannot tell probably cannot tell either (a range of releases that cannot be built), and
    the more of them were met, the further away one has to go.

    Args:
        width: of the range in which the turn lies.
        unknown: those of the range that cannot tell, in order.
        budget: questions that may still be answered good or bad.
    """
    count = len(open_ones)
    if not unknown:
        return open_ones[(count - 1) // 2]
    half = 1 << (budget - 1)
    reach = min(2.0 ** (len(unknown) - 1), max(1.0, width / 4))

    def telling(rank: int) -> float:
        place = bisect.bisect(unknown, open_ones[rank])
        distance = min(abs(open_ones[rank] - index) for index in unknown[max(0, place - 1) : place + 1])
        return 1.0 - 2.0 ** (-distance / reach)

    def worth(rank: int) -> tuple[float, float]:
        return telling(rank) * _entropy((rank + 1) / (count + 1)), -abs(rank - (count - 1) / 2)

    # Within these ranks the budget suffices whatever is answered.
    balanced = [rank for rank in range(count) if rank < half and count - 1 - rank < half]
    best = max(balanced, key=worth)
    if telling(best) < 0.25:  # a third one that cannot tell: rather one question more than all of a range
        best = max(range(count), key=worth)
    return open_ones[best]


def _entropy(share: float) -> float:
    return -sum(part * math.log2(part) for part in (share, 1 - share) if part > 0)


def _confirm(count: int, votes: Mapping[int, Sequence[Vote]], before: int, after: int, policy: Policy) -> Ask | Found:
    """The result, or the more doubtful of its two ends once more.

    Any single wrong answer makes the search close in on that answer, so it is one of the two ends: asking these
    again is enough to uncover it.
    """
    likely = _likelihoods(count, votes, policy)
    top = max(likely)
    mass = [math.exp(value - top) for value in likely]
    total = sum(mass)
    confidence = sum(mass[before + 1 : after + 1]) / total
    if confidence < policy.confidence:
        doubtful = [(sum(mass[: before + 1]), before), (sum(mass[after + 1 :]), after)]
        for _, index in sorted(doubtful, reverse=True):
            if len(votes[index]) < policy.max_votes:
                return Ask(index, 1, again=True)
    return Found(before, after, confidence)
