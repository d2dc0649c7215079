"""The judge: turns what a suite measured into a verdict, compares it with the catalogue and records it."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat import _location, stack
from pytest_trlcompat._escaping import printable
from pytest_trlcompat._provenance import Provenance, difference, of_this_process
from pytest_trlcompat._secrets import redacted
from pytest_trlcompat.catalog import attribution, known_issues
from pytest_trlcompat.catalog.issue import KnownIssue, Prediction
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.verdict import Record, Verdict, append_record, read_records
from pytest_trlcompat.launch import Failure, LaunchError, StrategyAbsent

if TYPE_CHECKING:
    from pytest_trlcompat.accelerator.artefacts import Artefact

__all__ = ["MEASURED_AGAIN", "Absent", "Finding", "Judge", "Untestable"]

MEASURED_AGAIN = "trlcompat-measured-again"
"""Property of a test whose recorded verdict was not taken over, with the reason as :func:`difference` says it."""

_MESSAGE_LIMIT, _TRACEBACK_LIMIT = 600, 4000


class Absent(Exception):
    """This release has no such trainer or strategy; a measurement raises it with the reason."""


class Untestable(Exception):
    """This machine cannot show it; a measurement raises it with the reason."""


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
        resume: reuse a verdict that already stands in ``results`` and do not measure again, if it was measured with
            this code and these packages; what was not is measured again, and the summary says so.
        properties: where pytest keeps what reaches JUnit XML and xdist's controller.
        catalog: the known issues among which one is looked for that explains a failure.
        provenance: what this process measures with, which each record carries.
    """

    issue: KnownIssue
    results: Path | None = None
    resume: bool = False
    properties: list[tuple[str, object]] = field(default_factory=list)
    catalog: Catalog = field(default_factory=known_issues.load)
    provenance: Provenance = field(default_factory=of_this_process)

    def __call__(self, measure: Callable[[], Finding], *, subject: str, strategy: str) -> Record:
        """Measure and judge.

        Args:
            measure: returns a :class:`Finding`; or raises :class:`Absent` or :class:`Untestable`, or the
                :class:`~pytest_trlcompat.launch.LaunchError` of a failed launch, from which the verdict follows:
                ``hang`` for a timeout, ``broken`` for the issue's known symptom, ``untestable`` for a limit of the
                software accelerator, else ``error``. A finding whose evidence names such a limit is
                ``untestable`` as well, unless it is ``ok``, ``absent`` or the known symptom. An ``error`` all of
                whose failures are symptoms of other known issues, which the catalogue predicts to be a problem on
                this stack, becomes ``blocked`` by one of them, see :mod:`pytest_trlcompat.catalog.attribution`; for
                the corrected trainer only where the catalogue predicts that.

        Raises:
            pytest.fail.Exception: the verdict is not the one that the catalogue predicts, or is ``error`` or ``hang``
                unpredicted.
            pytest.skip.Exception: it is ``untestable``, with the reason. Nothing was learnt, so the test can neither
                pass nor fail; a sweep counts the record, which is written before, and shows it with its reason.
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
        record = next((record for record in read_records(self.results) if record.key == key), None)
        if record is None:
            return None
        if why := difference(record.provenance, self.provenance):
            self.properties.append((MEASURED_AGAIN, why))
            return None
        return record

    def _measure(
        self, measure: Callable[[], Finding], subject: str, strategy: str, prediction: Prediction | None
    ) -> Record:
        started = time.monotonic()
        try:
            finding = measure()
        except (Absent, StrategyAbsent) as reason:
            finding = Finding(Verdict.ABSENT, {"reason": str(reason)})
        except Untestable as reason:
            finding = Finding(Verdict.UNTESTABLE, {"reason": str(reason)})
        except LaunchError as error:
            finding = self._failed(error)
        # The suite's own error, which is no verdict unless an artefact has led to it.
        except Exception as error:
            artefact = _met_by(error)
            if artefact is None:
                raise
            finding = _untestable(
                artefact, {"suite": f"{type(error).__name__}: {redacted(str(error))[:_MESSAGE_LIMIT]}"}
            )
        finding = _not_for_others(finding)
        record = Record(
            issue=self.issue.id,
            subject=subject,
            strategy=strategy,
            verdict=finding.verdict,
            evidence=finding.evidence,
            seconds=time.monotonic() - started,
            provenance=str(self.provenance),
        )
        if finding.verdict is Verdict.ERROR:
            record = attribution.attributed(record, self.issue, stack.installed(), self.catalog, prediction)
        record = attribution.expecting(record, prediction).without_secrets()
        if self.results is not None:
            self._write(self.results, record)
        return record

    def _write(self, results: Path, record: Record) -> None:
        """Append the verdict, or end the session."""
        try:
            append_record(results, record)
        # Further verdicts could not be written either.
        except OSError as error:
            pytest.exit(
                f"the verdict of {record.issue} ({record.subject}, {record.strategy}) cannot be written to {results}: "
                f"{error.strerror}. Those before it are kept; the same command goes on after them",
                returncode=pytest.ExitCode.INTERNAL_ERROR,
            )

    def _failed(self, error: LaunchError) -> Finding:
        failure = error.failure
        if failure is None:
            hung = error.result is not None and error.result.timed_out
            evidence: dict[str, Any] = {"launch": redacted(str(error))[-_TRACEBACK_LIMIT:]}
            if error.artefact is not None:
                return _untestable(error.artefact, evidence)
            return Finding(Verdict.HANG if hung else Verdict.ERROR, evidence)
        evidence = _raised(failure)
        if others := _of_other_ranks(error):
            evidence["other_ranks"] = others
        # Before the artefact: a known symptom takes precedence over a limit of the device.
        if self.issue.shows(failure.mro, failure.message, _location.of_traceback(failure.traceback)):
            return Finding(Verdict.BROKEN, evidence)
        return Finding(Verdict.ERROR, evidence) if error.artefact is None else _untestable(error.artefact, evidence)

    def _compare(self, record: Record, prediction: Prediction | None) -> None:
        if record.untested:
            predicted = "nothing" if prediction is None else prediction.verdict
            what = f"{record.issue}, {record.subject}, {record.strategy}"
            pytest.skip(printable(f"{what} could not be tested; predicted is {predicted}. {record.reason}"))
        if prediction is None:
            if record.verdict in (Verdict.ERROR, Verdict.HANG):
                self._fail(record, "the catalogue predicts nothing here")
        elif not record.as_predicted:
            self._fail(record, f"the catalogue predicts: {prediction.describe()}")

    def _fail(self, record: Record, what: str) -> None:
        evidence = "\n".join(f"  {key}: {value}" for key, value in record.evidence.items())
        by = f" by {record.blocked_by}" if record.blocked_by else ""
        text = (
            f"{record.issue}, {record.subject}, {record.strategy}: the verdict is {record.verdict}{by}; {what}.\n"
            f"stack: {stack.describe(stack.installed())}\n"
            f"evidence:\n{evidence}\n"
            f"If this verdict is right, correct the entry '{record.issue}' in {known_issues.source_of(record.issue)}."
        )
        pytest.fail(printable(text), pytrace=False)


def _of_other_ranks(error: LaunchError) -> dict[str, Any]:
    """Of the ranks that failed by themselves beside the root cause: what they raised, or how they ended."""
    others = () if error.result is None else error.result.failed_by_themselves[1:]
    return {
        str(rank.rank): {"exception": _ENDED, "message": rank.describe()}
        if rank.failure is None
        else _raised(rank.failure)
        for rank in others
    }


def _raised(failure: Failure) -> dict[str, Any]:
    return {
        "exception": failure.type_name,
        "message": redacted(failure.message)[:_MESSAGE_LIMIT],
        "traceback": redacted(failure.traceback)[-_TRACEBACK_LIMIT:],
        "location": _location.of_traceback(failure.traceback),
        "classes": list(failure.mro),
    }


_ENDED = "ended"
"""In place of an exception's name, of a rank that ended without one; no symptom has it."""
_FINAL = (Verdict.OK, Verdict.BROKEN, Verdict.ABSENT, Verdict.UNTESTABLE)
"""Verdicts that stand whatever else was met: the result is right, the known symptom was seen, or nothing was run."""


def _not_for_others(finding: Finding) -> Finding:
    """The finding; ``untestable`` where its evidence names a limit of the software accelerator.

    Suites go on after a failure and keep its text (:func:`pytest_trlcompat.accelerator.artefacts.error_text`); what
    they then measure, or miss, comes from it.
    """
    if finding.verdict in _FINAL:
        return finding
    artefact = next(_artefacts_in(finding.evidence), None)
    return finding if artefact is None else _untestable(artefact, finding.evidence)


def _met_by(error: Exception) -> Artefact | None:
    """The artefact in what a suite had in hand when it could not go on: numbers are missing, an assertion fails."""
    if error.__traceback__ is None:
        return None
    # Without this module's own frame.
    in_hand = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__.tb_next)]
    return next(_artefacts_in(in_hand), None)


def _artefacts_in(evidence: object, depth: int = 8) -> Iterator[Artefact]:
    from pytest_trlcompat.accelerator import artefacts  # pytest loads this module at every start

    parts: Iterable[object] = ()
    if isinstance(evidence, str):
        artefact = artefacts.in_text(evidence)
        if artefact is not None:
            yield artefact
    elif isinstance(evidence, Mapping):
        parts = list(evidence.values())
    elif isinstance(evidence, (list, tuple)):
        parts = evidence
    elif dataclasses.is_dataclass(evidence) and "suites" in type(evidence).__module__.split("."):
        # What a suite keeps to itself are launches, of other strategies too.
        names = (field.name for field in dataclasses.fields(evidence))
        parts = [getattr(evidence, name) for name in names if not name.startswith("_")]
    for part in parts if depth else ():
        yield from _artefacts_in(part, depth - 1)


def _untestable(artefact: Artefact, evidence: Mapping[str, Any]) -> Finding:
    others = {name: value for name, value in evidence.items() if name != "reason"}
    return Finding(Verdict.UNTESTABLE, {"reason": artefact.describe(), **others})
