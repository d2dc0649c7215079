"""The standard: what the two ends showed, against which every other observation is held.

Imports only the standard library and this room.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pytest_trlcompat.bisect.observation import Fingerprint, Observation, same
from pytest_trlcompat.bisect.search import Answer, Refusal

__all__ = ["KNOWN_SYMPTOMS", "Judgement", "NoStandard", "Standard", "judge", "one_line", "set_standard"]

KNOWN_SYMPTOMS = ("broken", "silent", "wasteful")
"""Verdicts that show a known issue; ``error`` and ``hang`` are other failures."""


class NoStandard(Exception):
    """The ends do not differ as they should."""

    def __init__(self, why: Refusal) -> None:
        super().__init__(why.value)
        self.why = why


@dataclass(frozen=True)
class Standard:
    """The checks that passed at the good end and failed at the bad one, with their failures."""

    watched: Mapping[str, Fingerprint]

    def __str__(self) -> str:
        return "; ".join(
            str(failure) if len(self.watched) == 1 else f"{check}: {failure}" for check, failure in self.watched.items()
        )


@dataclass(frozen=True)
class Judgement:
    """An answer, and in a few words why."""

    answer: Answer
    why: str


def set_standard(good: Observation, bad: Observation) -> Standard:
    """The standard that the two ends set.

    Where some of the failures show the known issue, other ones are not watched.

    Raises:
        NoStandard: when nothing passed at the good end that failed at the bad one.
    """
    turned = _turned(good, bad)
    if turned:
        known = {check: failure for check, failure in turned.items() if _verdict(bad, check) in KNOWN_SYMPTOMS}
        return Standard(known or turned)
    if _turned(bad, good):
        raise NoStandard(Refusal.SWAPPED)
    if good.failed and bad.failed:
        raise NoStandard(Refusal.BOTH_BAD)
    if good.passed and bad.passed:
        raise NoStandard(Refusal.BOTH_GOOD)
    raise NoStandard(Refusal.UNKNOWN_END)


def judge(observation: Observation, standard: Standard | None) -> Judgement:
    """Good where all watched checks passed, bad where one of them failed as at the bad end; else it cannot tell.

    Args:
        standard: ``None`` until both ends were seen; then any failure is bad.
    """
    if not observation.told:
        reasons = [observation.reason, *observation.untold.values()]
        return Judgement(
            Answer.UNKNOWN, next((one_line(reason) for reason in reasons if reason), "nothing was measured")
        )
    if standard is None:
        return _plainly(observation)
    watched = standard.watched
    alike = {
        check for check, failure in observation.failed.items() if check in watched and same(failure, watched[check])
    }
    if alike:
        return Judgement(Answer.BAD, _named(alike, {check: str(observation.failed[check]) for check in alike}, watched))
    others = {
        check: f"another failure: {observation.failed[check]}" for check in watched if check in observation.failed
    }
    untold = {check: one_line(observation.untold.get(check, "not measured")) for check in watched}
    unclear = {check: others.get(check, untold[check]) for check in watched if check not in observation.passed}
    if unclear:
        return Judgement(Answer.UNKNOWN, _named(unclear, unclear, watched))
    return Judgement(Answer.GOOD, _named(watched, observation.passed, watched))


def _plainly(observation: Observation) -> Judgement:
    texts = {**observation.passed, **{check: str(failure) for check, failure in observation.failed.items()}}
    return Judgement(Answer.BAD if observation.failed else Answer.GOOD, _named(texts, texts, texts))


def _turned(good: Observation, bad: Observation) -> dict[str, Fingerprint]:
    return {check: failure for check, failure in bad.failed.items() if check in good.passed}


def _verdict(observation: Observation, check: str) -> str:
    return str(dict(observation.evidence.get(check, {})).get("verdict", ""))


def _named(checks: object, texts: Mapping[str, str], among: Mapping[str, object]) -> str:
    """The text alone where there is one check, else every check with its text."""
    if len(among) == 1:
        return next(iter(texts.values()))
    chosen = sorted(checks)  # type: ignore[call-overload]
    return "; ".join(f"{check} {texts[check]}" for check in chosen)


def one_line(text: str) -> str:
    """A reason of several lines on one, shortened."""
    joined = " ".join(text.split())
    return joined if len(joined) <= 240 else joined[:237] + "..."
