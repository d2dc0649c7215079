"""An observation: what one run of the predicate in one environment showed, and how it is kept as JSON.

Imports only the standard library and this room.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from pytest_trlcompat.bisect.fingerprint import Fingerprint

__all__ = ["Observation"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Observation:
    """What was seen, check by check.

    A check is one strategy of a suite, one pytest test, or the command.

    Attributes:
        passed: checks that passed, and what each said.
        failed: checks that failed.
        untold: checks that cannot tell (a trainer that this release does not have, a skipped test), with the reason.
        reason: why nothing at all could be told (the environment cannot be built); empty otherwise.
        evidence: per check, numbers and texts that were measured.
        doubt: probability that a second run shows the opposite.
        seconds: wall-clock time of the run.
        build_seconds: of resolving and building the environment.
        reused: the environment stood already.
    """

    passed: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, Fingerprint] = field(default_factory=dict)
    untold: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    doubt: float = 0.0
    seconds: float = 0.0
    build_seconds: float = 0.0
    reused: bool = False

    @property
    def told(self) -> bool:
        return bool(self.passed or self.failed)

    def only(self, pattern: str) -> Observation:
        """What was seen of the checks whose names match a shell pattern."""
        if pattern == "*" or not (self.told or self.untold):
            return self

        def chosen(checks: Mapping[str, _T]) -> dict[str, _T]:
            return {check: what for check, what in checks.items() if fnmatchcase(check, pattern)}

        kept = dataclasses.replace(
            self, passed=chosen(self.passed), failed=chosen(self.failed), untold=chosen(self.untold)
        )
        if kept.told or kept.untold:
            return kept
        there = ", ".join(sorted({*self.passed, *self.failed, *self.untold}))
        return dataclasses.replace(kept, reason=f"nothing was measured under {pattern!r}, but under {there}")

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": dict(self.passed),
            "failed": {check: failure.to_json() for check, failure in self.failed.items()},
            "untold": dict(self.untold),
            "reason": self.reason,
            "evidence": dict(self.evidence),
            "doubt": self.doubt,
            "seconds": round(self.seconds, 2),
            "build_seconds": round(self.build_seconds, 2),
            "reused": self.reused,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Observation:
        """
        Raises:
            KeyError, TypeError: when it is none.
        """
        failed = {check: Fingerprint.from_json(failure) for check, failure in raw["failed"].items()}
        return cls(**{**raw, "failed": failed})
