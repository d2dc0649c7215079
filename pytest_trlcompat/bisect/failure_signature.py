"""The failure that is searched for: what failed at the bad end and passed at the good one.

Every other observation is compared with it, so that the search does not drift to another failure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pytest_trlcompat.bisect.observation import Fingerprint, Observation, same_failure
from pytest_trlcompat.bisect.search import Answer, RangeProblem

__all__ = ["FailureSignature", "Judgement", "NoSignature", "judge", "one_line", "signature_of"]

_KNOWN_SYMPTOMS = ("broken", "silent", "wasteful")
"""Verdicts that show a known issue; ``error`` and ``hang`` are other failures."""


class NoSignature(Exception):
    """The ends do not differ as they should."""

    def __init__(self, problem: RangeProblem) -> None:
        super().__init__(problem.value)
        self.problem = problem


@dataclass(frozen=True)
class FailureSignature:
    """The checks that passed at the good end and failed at the bad one, with their failures."""

    failures: Mapping[str, Fingerprint]

    def __str__(self) -> str:
        return _by_check(self.failures, self.failures)


@dataclass(frozen=True)
class Judgement:
    """An answer, and in a few words why."""

    answer: Answer
    why: str


def signature_of(good: Observation, bad: Observation) -> FailureSignature:
    """What failed at the bad end and passed at the good one.

    Where some of the failures show the known issue, the others are no part of the signature.

    Raises:
        NoSignature: when nothing passed at the good end that failed at the bad one.
    """
    failures = _failures_of_passed(good, bad)
    if failures:
        known = {check: failure for check, failure in failures.items() if _verdict(bad, check) in _KNOWN_SYMPTOMS}
        return FailureSignature(known or failures)
    if _failures_of_passed(bad, good):
        raise NoSignature(RangeProblem.SWAPPED)
    if good.failed and bad.failed:
        raise NoSignature(RangeProblem.BOTH_BAD)
    if good.passed and bad.passed:
        raise NoSignature(RangeProblem.BOTH_GOOD)
    raise NoSignature(RangeProblem.INCONCLUSIVE_END)


def judge(observation: Observation, signature: FailureSignature | None) -> Judgement:
    """Bad where a check of the signature failed as at the bad end, good where all of them passed, else inconclusive.

    Args:
        signature: ``None`` until both ends were tested; then any failure is bad.
    """
    if not observation.conclusive:
        reasons = [observation.reason, *observation.inconclusive.values()]
        why = next((one_line(reason) for reason in reasons if reason), "nothing was measured")
        return Judgement(Answer.INCONCLUSIVE, why)
    if signature is None:
        texts = {**observation.passed, **observation.failed}
        return Judgement(Answer.BAD if observation.failed else Answer.GOOD, _by_check(texts, texts))
    expected = signature.failures
    matching = {
        check: failure
        for check, failure in observation.failed.items()
        if check in expected and same_failure(failure, expected[check])
    }
    if matching:
        return Judgement(Answer.BAD, _by_check(matching, expected))
    unclear = {check: _why_unclear(observation, check) for check in expected if check not in observation.passed}
    if unclear:
        return Judgement(Answer.INCONCLUSIVE, _by_check(unclear, expected))
    return Judgement(Answer.GOOD, _by_check({check: observation.passed[check] for check in expected}, expected))


def _why_unclear(observation: Observation, check: str) -> str:
    if check in observation.failed:
        return f"another failure: {observation.failed[check]}"
    return one_line(observation.inconclusive.get(check, "not measured"))


def _failures_of_passed(good: Observation, bad: Observation) -> dict[str, Fingerprint]:
    return {check: failure for check, failure in bad.failed.items() if check in good.passed}


def _verdict(observation: Observation, check: str) -> str:
    return str(dict(observation.evidence.get(check, {})).get("verdict", ""))


def _by_check(texts: Mapping[str, object], checks: Iterable[str]) -> str:
    """Every check with its text; the text alone where there is one check in all."""
    if len(list(checks)) == 1:
        return str(next(iter(texts.values())))
    return "; ".join(f"{check}: {text}" for check, text in sorted(texts.items()))


def one_line(text: str) -> str:
    """A reason of several lines on one, shortened."""
    joined = " ".join(text.split())
    return joined if len(joined) <= 240 else joined[:237] + "..."
