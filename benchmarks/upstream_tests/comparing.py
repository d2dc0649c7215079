"""What TRL's tests say of TRL's own trainers and of the corrected ones, test by test. Needs no stack."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pytest_trlcompat.matrix.errors import MatrixError

MISSING = "missing"
"""The outcome of a test that one run has and the other one has not, since its process ended before."""


@dataclass(frozen=True)
class Outcome:
    """What a test came to.

    Attributes:
        outcome: ``passed``, ``failed``, ``skipped``, ``xfailed`` or ``missing``.
        text: the traceback, or the reason for which it was skipped.
    """

    outcome: str
    text: str = ""


@dataclass(frozen=True)
class Comparison:
    """One release's tests, with TRL's trainers as they are and with the corrected ones.

    Attributes:
        release: of TRL.
        tests_from: where its tests are from.
        explained: test to the reason why it may fail with the corrected trainers alone.
    """

    release: str
    tests_from: str
    upstream: Mapping[str, Outcome]
    corrected: Mapping[str, Outcome]
    explained: Mapping[str, str] = field(default_factory=dict)

    @property
    def tests(self) -> list[str]:
        return list(dict.fromkeys([*self.upstream, *self.corrected]))

    def of_upstream(self, test: str) -> Outcome:
        return self.upstream.get(test, Outcome(MISSING))

    def of_corrected(self, test: str) -> Outcome:
        return self.corrected.get(test, Outcome(MISSING))

    @property
    def differing(self) -> list[str]:
        """Tests with another outcome as they are than with the corrected trainers."""
        return [test for test in self.tests if self.of_upstream(test).outcome != self.of_corrected(test).outcome]

    @property
    def cured(self) -> list[str]:
        """Tests that pass with the corrected trainers alone."""
        return [test for test in self.differing if self.of_corrected(test).outcome == "passed"]

    @property
    def broken(self) -> list[str]:
        """Tests that differ, neither for the better nor for a reason that is written down."""
        return [test for test in self.differing if test not in self.cured and test not in self.explained]

    @property
    def failing(self) -> list[str]:
        """Tests that fail in both runs."""
        return [
            test for test in self.tests if self.of_upstream(test).outcome == "failed" and test not in self.differing
        ]

    @property
    def skipped(self) -> dict[str, int]:
        """Reason to the number of tests that are skipped in both runs."""
        found = (self.of_upstream(test) for test in self.tests if test not in self.differing)
        return dict(Counter(each.text for each in found if each.outcome == "skipped").most_common())

    @property
    def problems(self) -> list[str]:
        """What makes the session fail."""
        found = [
            f"{test}: {self.of_upstream(test).outcome} as it is, {self.of_corrected(test).outcome} with the corrected "
            f"trainers\n{self.of_corrected(test).text}".rstrip()
            for test in self.broken
        ]
        found += [
            f"{test}: is listed as differing ({reason}), but does not"
            for test, reason in self.explained.items()
            if test not in self.differing
        ]
        if not self._count(self.upstream, "passed"):
            found.append("no test passes as it is, so nothing is compared")
        return [f"trl {self.release}: {each}" for each in found]

    def row(self) -> list[str]:
        """Of the table, as in :data:`HEADINGS`."""
        skipped, xfailed = sum(self.skipped.values()), self._count(self.upstream, "xfailed")
        counts = (
            *(len(self.tests), self._count(self.upstream, "passed"), self._count(self.corrected, "passed")),
            *(skipped, xfailed, len(self.failing), len(self.differing)),
        )
        return [f"{self.release}, {self.tests_from}", *map(str, counts)]

    def notes(self) -> list[str]:
        """What differs for the better or for a known reason, what fails in both runs, and why tests are skipped."""
        return [
            *(f"passes with the corrected trainers alone: {test}" for test in self.cured),
            *(f"fails with the corrected trainers alone: {test}: {why}" for test, why in self.explained.items()),
            *(f"fails in both: {test}: {_last_line(self.of_upstream(test).text)}" for test in self.failing),
            *(f"skipped: {number} tests: {reason}" for reason, number in self.skipped.items()),
        ]

    def to_json(self) -> str:
        """All of it, for programs."""
        tests = {
            test: {
                "upstream": self.of_upstream(test).outcome,
                "corrected": self.of_corrected(test).outcome,
                "text": self.of_corrected(test).text or self.of_upstream(test).text,
            }
            for test in self.tests
        }
        summary = dict(zip(HEADINGS, self.row(), strict=True))
        return json.dumps({**summary, "problems": self.problems, "notes": self.notes(), "outcomes": tests}, indent=2)

    @staticmethod
    def _count(outcomes: Mapping[str, Outcome], outcome: str) -> int:
        return sum(each.outcome == outcome for each in outcomes.values())


HEADINGS = ("tests of", "tests", "passed as is", "passed with ours", "skipped", "xfailed", "failed in both", "differ")


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("E ")] or text.splitlines() or [""]
    return lines[-1].removeprefix("E ").strip()


def read_outcomes(files: Iterable[Path]) -> dict[str, Outcome]:
    """What a run's files say, a line per test."""
    lines = [json.loads(line) for file in files if file.exists() for line in file.read_text("utf-8").splitlines()]
    return {line["test"]: Outcome(line["outcome"], line["text"]) for line in lines}


def explanations(entries: Iterable[Mapping[str, str]], release: str) -> dict[str, str]:
    """Test to reason, of those entries that are about a release.

    Raises:
        MatrixError: an entry has no reason.
    """
    for entry in entries:
        if not entry.get("why"):
            raise MatrixError(
                f"{entry.get('test')}: a test that may fail with the corrected trainers needs a reason: why"
            )
    return {entry["test"]: entry["why"] for entry in entries if entry["release"] == release}


def table(comparisons: Iterable[Comparison]) -> str:
    """A row per release."""
    rows = [list(HEADINGS), *(each.row() for each in comparisons)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
