"""The judge: turns what a suite measured into a verdict, compares it with the catalogue and records it.

Part of the plugin; imports no package of the stack.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat import stack
from pytest_trlcompat.catalog import KnownIssue, Prediction
from pytest_trlcompat.launch import LaunchError
from pytest_trlcompat.verdict import Record, Verdict, append_record, read_records

__all__ = ["Absent", "Finding", "Judge"]

_MESSAGE_LIMIT, _TRACEBACK_LIMIT = 600, 4000


class Absent(Exception):
    """This release has no such trainer or strategy; a measurement raises it with the reason."""


@dataclass(frozen=True)
class Finding:
    """What a measurement found.

    Attributes:
        evidence: numbers and texts that can be written as JSON.
    """

    verdict: Verdict
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass
class Judge:
    """Judges one test of a suite.

    Attributes:
        results: the JSON-lines file that takes the verdict, if any.
        resume: reuse a verdict that already stands in ``results`` and do not measure again.
        properties: where pytest keeps what reaches JUnit XML and xdist's controller.
    """

    issue: KnownIssue
    results: Path | None = None
    resume: bool = False
    properties: list[tuple[str, object]] = field(default_factory=list)

    def __call__(self, measure: Callable[[], Finding], *, subject: str, strategy: str) -> Record:
        """Measure and judge.

        Args:
            measure: returns a :class:`Finding`; or raises :class:`Absent`, or the
                :class:`~pytest_trlcompat.launch.LaunchError` of a failed launch, from which the verdict follows:
                ``hang`` for a timeout, ``broken`` for the issue's known symptom, else ``error``.

        Raises:
            pytest.fail.Exception: the verdict is not the one that the catalogue predicts, or is ``error`` or ``hang``
                unpredicted.
        """
        prediction = self.issue.predict(subject, strategy, stack.installed())
        record = self._recorded(subject, strategy) or self._measure(measure, subject, strategy, prediction)
        self.properties.append(("trlcompat", record.to_json()))
        self._compare(record, prediction)
        return record

    def _recorded(self, subject: str, strategy: str) -> Record | None:
        if not self.resume or self.results is None:
            return None
        key = (self.issue.id, subject, strategy)
        return next((record for record in read_records(self.results) if record.key == key), None)

    def _measure(
        self, measure: Callable[[], Finding], subject: str, strategy: str, prediction: Prediction | None
    ) -> Record:
        started = time.monotonic()
        try:
            finding = measure()
        except Absent as reason:
            finding = Finding(Verdict.ABSENT, {"reason": str(reason)})
        except LaunchError as error:
            finding = self._failed(error)
        record = Record(
            issue=self.issue.id,
            subject=subject,
            strategy=strategy,
            verdict=finding.verdict,
            expected=None if prediction is None else prediction.verdict,
            evidence=finding.evidence,
            seconds=time.monotonic() - started,
        )
        if self.results is not None:
            append_record(self.results, record)
        return record

    def _failed(self, error: LaunchError) -> Finding:
        failure = error.failure
        if failure is None:
            hung = error.result is not None and error.result.timed_out
            return Finding(Verdict.HANG if hung else Verdict.ERROR, {"launch": str(error)[-_TRACEBACK_LIMIT:]})
        evidence = {
            "exception": failure.type_name,
            "message": failure.message[:_MESSAGE_LIMIT],
            "traceback": failure.traceback[-_TRACEBACK_LIMIT:],
        }
        return Finding(Verdict.BROKEN if self.issue.shows(failure.mro, failure.message) else Verdict.ERROR, evidence)

    def _compare(self, record: Record, prediction: Prediction | None) -> None:
        if prediction is None:
            if record.verdict in (Verdict.ERROR, Verdict.HANG):
                self._fail(record, "the catalogue predicts nothing here")
        elif not record.as_predicted:
            self._fail(record, f"the catalogue predicts: {prediction.describe()}")

    def _fail(self, record: Record, what: str) -> None:
        evidence = "\n".join(f"  {key}: {value}" for key, value in record.evidence.items())
        pytest.fail(
            f"{record.issue}, {record.subject}, {record.strategy}: the verdict is {record.verdict}; {what}.\n"
            f"stack: {stack.describe(stack.installed())}\n"
            f"evidence:\n{evidence}\n"
            f"If this verdict is right, mend the entry '{record.issue}' in pytest_trlcompat/catalog.toml.",
            pytrace=False,
        )
