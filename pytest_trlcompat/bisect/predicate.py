"""What is tested on each candidate: a known issue's verdict, a pytest test, or a command."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from pytest_trlcompat._secrets import redacted
from pytest_trlcompat.accelerator import artefacts
from pytest_trlcompat.bisect.candidates import ExecutionContext, Hung
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.bisect.observation import Fingerprint, Observation, fingerprint_of, normalise
from pytest_trlcompat.catalog.attribution import failures_in
from pytest_trlcompat.catalog.verdict import Record, RecordError, Verdict, read_records
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.suite_run import code_digest, suite_command

__all__ = ["CommandPredicate", "IssuePredicate", "Predicate", "PytestPredicate"]

_HANG_DOUBT = 0.1
"""On a busy machine a slow run can look like a hang."""

_EVIDENCE_CHARACTERS = 4000
"""Of the log's end, which are kept."""

_REASON_LINES = 12
"""Of the log's end, which a reason may have."""

_FRAMES = 3
"""Innermost functions of a failure that a suite kept as a text, as of a traceback."""

_SKIP_STATUS = 125
_NOT_RUN = (126, 127)
"""Exit statuses with which a shell reports that it could not start the command."""


class Predicate(Protocol):
    """Observes what passes and what fails in one execution context."""

    @property
    def slug(self) -> str:
        """A name for folders."""
        ...

    @property
    def digest(self) -> str:
        """A digest of all that an observation depends on, apart from the execution context."""
        ...

    def describe(self) -> str:
        """For people: completes the sentence "broke ..."."""
        ...

    def observe(self, context: ExecutionContext, work: Path) -> Observation:
        """Run in a context; ``work`` is an empty folder for the predicate's files."""
        ...


@dataclass(frozen=True)
class IssuePredicate:
    """The verdicts of a known issue's suite for subject ``upstream``, one check for each strategy."""

    layout: Layout
    issue: str
    timeout: float | None = None
    doubt: float = 0.0

    @property
    def slug(self) -> str:
        return self.issue

    @property
    def digest(self) -> str:
        return _digest("issue", self.issue, code_digest(self.layout))

    def describe(self) -> str:
        return self.issue

    def observe(self, context: ExecutionContext, work: Path) -> Observation:
        assert context.environment is not None, "a suite needs an environment"
        results, log = work / "verdicts.jsonl", work / "output.txt"
        suite = suite_command(context.environment, self.layout, results, [self.issue])
        command = [*suite, "--trlcompat-subject", "upstream"]
        try:
            status = context.run(command, log, self.timeout)
        except Hung as error:
            return Observation(failed={"suite": Fingerprint("hang", str(error))}, doubt=_HANG_DOUBT)
        try:
            records = [record for record in read_records(results) if record.subject == "upstream"]
        except RecordError as error:
            return Observation(reason=f"the suite's verdicts cannot be read: {error}")
        if not records:
            return Observation(
                reason=f"the suite gave no verdict (pytest ended with exit status {status}): {_end_of(log)}"
            )
        return self._of_records(records)

    def _of_records(self, records: Iterable[Record]) -> Observation:
        passed, failed, inconclusive, evidence = {}, {}, {}, {}
        doubt = self.doubt
        for record in records:
            evidence[record.strategy] = {"verdict": record.verdict.value, **record.evidence}
            if record.verdict is Verdict.OK:
                passed[record.strategy] = record.verdict.value
            elif record.verdict in (Verdict.ABSENT, Verdict.UNTESTABLE):
                inconclusive[record.strategy] = f"{record.verdict}: {record.reason}"
            else:
                failed[record.strategy] = _of_verdict(record)
                doubt = max(doubt, _HANG_DOUBT if record.verdict is Verdict.HANG else 0.0)
        return Observation(passed, failed, inconclusive, evidence=evidence, doubt=doubt)


def _of_verdict(record: Record) -> Fingerprint:
    """The verdict itself; for another failure than the known symptom its exception.

    The fingerprint is the same whether or not the catalogue explains the failure there by an issue that blocks.
    """
    if record.verdict not in (Verdict.ERROR, Verdict.BLOCKED):
        # The suite has recognised the known symptom.
        return Fingerprint(record.verdict.value)
    evidence = record.evidence
    fingerprint = fingerprint_of(str(evidence.get("traceback", evidence.get("launch", ""))), "error")
    if "exception" in evidence:
        return Fingerprint(str(evidence["exception"]), normalise(str(evidence.get("message", ""))), fingerprint.frames)
    failed = next(failures_in(evidence), None) if fingerprint.kind == Verdict.ERROR.value else None
    if failed is None:
        return fingerprint
    return Fingerprint(failed.classes[0], normalise(failed.message), failed.frames[:_FRAMES])


@dataclass(frozen=True)
class _CommandLine:
    """A command line of the caller's.

    Attributes:
        folder: in which it runs.
        in_worktree: it runs in the candidate's own folder (a commit's files) instead.
    """

    text: str
    folder: Path
    in_worktree: bool = False
    timeout: float | None = None
    doubt: float = 0.0

    slug: ClassVar[str]

    @property
    def digest(self) -> str:
        if self.in_worktree:
            return _digest(self.slug, self.text)
        return _digest(self.slug, self.text, str(self.folder), *_named_files(self.text, self.folder))

    def _inside(self, context: ExecutionContext) -> ExecutionContext:
        """The same context in the folder where the caller means it to run."""
        return context if self.in_worktree else ExecutionContext(context.environment, self.folder, context.overlay)


@dataclass(frozen=True)
class PytestPredicate(_CommandLine):
    """Any pytest test, with the plugin loaded: node ids and options, ``tests/test_loss.py::test_masked -k short``."""

    slug = "pytest"

    def describe(self) -> str:
        return f"pytest {self.text}"

    def observe(self, context: ExecutionContext, work: Path) -> Observation:
        report, log = work / "junit.xml", work / "output.txt"
        python = sys.executable if context.environment is None else str(context.environment.python)
        # fingerprint_of reads Python's own form of a traceback, hence --tb=native.
        command = [
            *(python, "-m", "pytest", "-p", "no:cacheprovider", "--tb=native", f"--junitxml={report}"),
            *(["-p", "trlcompat"] if context.environment is not None else []),
            *shlex.split(self.text),
        ]
        try:
            status = self._inside(context).run(command, log, self.timeout)
        except Hung as error:
            return Observation(failed={"pytest": Fingerprint("hang", str(error))}, doubt=_HANG_DOUBT)
        # pytest's status for a usage error, which every candidate would give.
        if status == 4:
            raise BisectError(f"--pytest {shlex.quote(self.text)}: pytest does not accept this: {_end_of(log)}")
        if not report.exists():
            return Observation(reason=f"pytest ended with exit status {status} and no report: {_end_of(log)}")
        return self._of_junit(report, log)

    def _of_junit(self, report: Path, log: Path) -> Observation:
        passed, failed, inconclusive, evidence = {}, {}, {}, {}
        try:
            cases = list(ElementTree.parse(report).iter("testcase"))
        except ElementTree.ParseError as error:
            return Observation(reason=f"pytest's report cannot be read ({error}): {_end_of(log)}")
        for case in cases:
            name = "::".join(part for part in (case.get("classname"), case.get("name")) if part)
            # Not with "or": an element without children counts as false.
            failure = case.find("failure") if case.find("failure") is not None else case.find("error")
            skipped = case.find("skipped")
            text = "" if failure is None else redacted(failure.text or "")
            artefact = artefacts.of_program(text)
            if artefact is not None:
                inconclusive[name] = artefact.describe()
                evidence[name] = {"verdict": "untestable", "traceback": text[-_EVIDENCE_CHARACTERS:]}
            elif failure is not None:
                failed[name] = fingerprint_of(text, "failed")
                evidence[name] = {"verdict": "failed", "traceback": text[-_EVIDENCE_CHARACTERS:]}
            elif skipped is not None:
                inconclusive[name] = skipped.get("message") or "skipped"
            else:
                passed[name] = "passed"
        if not (passed or failed or inconclusive):
            return Observation(reason=f"pytest collected no test: {_end_of(log)}")
        return Observation(passed, failed, inconclusive, evidence=evidence, doubt=self.doubt)


@dataclass(frozen=True)
class CommandPredicate(_CommandLine):
    """A shell command: exit status 0 is good, 125 to 127 are inconclusive, anything else is bad.

    A command that fails at a limit of the software accelerator is inconclusive too.
    """

    slug = "command"

    def describe(self) -> str:
        return f"`{self.text}`"

    def observe(self, context: ExecutionContext, work: Path) -> Observation:
        log = work / "output.txt"
        try:
            status = self._inside(context).run(["/bin/sh", "-c", self.text], log, self.timeout)
        except Hung as error:
            return Observation(failed={"command": Fingerprint("hang", str(error))}, doubt=_HANG_DOUBT)
        if status == 0:
            return Observation(passed={"command": "exit status 0"}, doubt=self.doubt)
        if status == _SKIP_STATUS:
            return Observation(reason=f"the command asked to skip this candidate (exit status 125): {_end_of(log)}")
        if status in _NOT_RUN:
            return Observation(reason=f"the command could not be started (exit status {status}): {_end_of(log)}")
        text = _output(log)
        artefact = artefacts.of_program(text)
        if artefact is not None:
            evidence = {"command": {"verdict": "untestable", "output": text[-_EVIDENCE_CHARACTERS:]}}
            return Observation(inconclusive={"command": artefact.describe()}, evidence=evidence)
        ended = f"signal {-status}" if status < 0 else f"exit status {status}"
        evidence = {"command": {"verdict": ended, "output": text[-_EVIDENCE_CHARACTERS:]}}
        return Observation(failed={"command": fingerprint_of(text, ended)}, evidence=evidence, doubt=self.doubt)


def _named_files(text: str, folder: Path) -> list[str]:
    """The contents of the files that a command line names: when one is edited, earlier observations no longer count."""
    try:
        words = shlex.split(text)
    except ValueError:  # the shell may understand what shlex does not
        words = text.split()
    files = [folder / word.split("::")[0] for word in words]
    return [path.read_text(encoding="utf-8", errors="replace") for path in files if path.is_file()]


def _output(log: Path) -> str:
    """A program's output without secrets, which are taken out before it is cut."""
    return redacted(log.read_text(encoding="utf-8", errors="replace"))


def _end_of(log: Path) -> str:
    """The last lines of a program's output, on one line."""
    lines = [line.strip() for line in _output(log).splitlines() if line.strip()]
    return " / ".join(lines[-_REASON_LINES:])[-600:] or "it printed nothing"


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).hexdigest()[:12]
