"""Verdicts, and the JSON line that carries one from a cell to the report.

Both sides of a cell use it: pytest inside the environment, the matrix and the report outside.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trlcompat._json_files import Unreadable, lines_of, parse

if TYPE_CHECKING:
    from pytest_trlcompat._secrets import Redactor

__all__ = [
    "ATTRIBUTED",
    "FITTING",
    "NAME",
    "SEVERITY",
    "SUBJECTS",
    "Record",
    "RecordError",
    "Scan",
    "Verdict",
    "append_record",
    "is_wrong",
    "read_records",
    "scan_records",
]

SUBJECTS = ("upstream", "corrected")
"""Whose trainer a suite runs: TRL's own, or ours."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")
"""The id of a known issue or a cell, or the name of a strategy."""
ATTRIBUTED = ("blocked_by", "symptoms_of", "blocked_by_expected")
"""What the evidence holds of known issues, beside what was measured."""
_SHOWN = 200
"""Characters of a line that is no verdict that its error shows."""


class Verdict(str, Enum):
    """The answer of one suite for one subject under one strategy."""

    OK = "ok"
    """Right result at the right cost."""
    BROKEN = "broken"
    """The known symptom was seen."""
    SILENT = "silent"
    """No error, wrong result."""
    WASTEFUL = "wasteful"
    """Right result, wrong cost."""
    BLOCKED = "blocked"
    """Another known issue stops the suite first; see :attr:`Record.blocked_by`."""
    ERROR = "error"
    """A failure that no known issue explains."""
    HANG = "hang"
    """Did not end in time."""
    ABSENT = "absent"
    """This release has no such trainer or strategy."""
    UNTESTABLE = "untestable"
    """The environment cannot be built, or the software accelerator cannot do what the library asks of it; says why."""

    def __str__(self) -> str:
        return self.value

    @property
    def is_problem(self) -> bool:
        """Whether a user who trains with it has a problem."""
        return self not in (Verdict.OK, Verdict.ABSENT, Verdict.UNTESTABLE)

    @property
    def is_own_problem(self) -> bool:
        """Whether it is what the issue itself does, not what stopped its suite first or what nobody has explained."""
        return self.is_problem and self not in (Verdict.ERROR, Verdict.BLOCKED)


SEVERITY = (Verdict.SILENT, Verdict.BROKEN, Verdict.ERROR, Verdict.HANG, Verdict.WASTEFUL, Verdict.BLOCKED)
"""Verdicts that are a problem, the worst first: training goes on where no error stops it."""


_DIFFERING, _NO_SETTING = "differing", "not_in_this_release"
"""Fields of a conformance suite's evidence: what differs from the reference, and settings that the release lacks."""
FITTING: Mapping[Verdict, Mapping[str, Any]] = {Verdict.BLOCKED: {_DIFFERING: []}, Verdict.ABSENT: {_NO_SETTING: []}}
"""The least evidence by which such a verdict is :attr:`Record.fitting`, of those of which no more was kept."""


class RecordError(ValueError):
    """A line of a results file is not a verdict."""


@dataclass(frozen=True)
class Record:
    """One verdict with its evidence.

    Attributes:
        expected: what the catalogue predicts; ``None`` where it says nothing.
        evidence: numbers and texts that were measured; JSON values only.
        seconds: wall-clock time of the measurement.
        provenance: what it was measured with, as :class:`pytest_trlcompat._provenance.Provenance` writes it; empty
            where nobody wrote it down, which is equal to nothing.
    """

    issue: str
    subject: str
    strategy: str
    verdict: Verdict
    expected: Verdict | None = None
    evidence: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    provenance: str = field(default="", compare=False)

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.issue, self.subject, self.strategy)

    @property
    def as_predicted(self) -> bool:
        """Whether the verdict is the expected one, or at least does not speak against it.

        See :attr:`untested` and :attr:`fitting`.
        """
        # ``blocked`` must be so by the known issue that was expected.
        if self.evidence.get("blocked_by_expected", "") and self.verdict is Verdict.BLOCKED:
            return False
        # A corrected trainer may be absent wherever TRL's own is.
        absent = self.verdict is Verdict.ABSENT and self.subject == "corrected"
        unattributed = self.expected is Verdict.BLOCKED and self.unattributed
        # A setting that a release does not have speaks against a problem.
        fitting = self.fitting and (self.verdict is not Verdict.ABSENT or self.expected is Verdict.OK)
        fits = self.verdict is self.expected or absent or unattributed or fitting
        # What could not be tested speaks for nothing and against nothing.
        return self.expected is None or fits or self.untested

    @property
    def fitting(self) -> bool:
        """Whether it fits what is predicted, although it is not that: a conformance suite found something that other
        known issues predict, or the release does not have the setting.
        """
        return self.explained or (self.verdict is Verdict.ABSENT and _NO_SETTING in self.evidence)

    @property
    def explained(self) -> bool:
        """Whether a conformance suite found it, and explained it by other known issues that it names."""
        return self.verdict is Verdict.BLOCKED and _DIFFERING in self.evidence

    @property
    def unattributed(self) -> bool:
        """Whether it is an ``error`` of a time when failures were not attributed to other known issues.

        Such a record comes from published evidence alone, see :attr:`MeasuredCell.attributed
        <pytest_trlcompat.catalog.evidence.MeasuredCell.attributed>`; a sweep writes none.
        """
        return self.verdict is Verdict.ERROR and self.evidence.get("attributed") is False

    @property
    def untested(self) -> bool:
        """Whether nothing is known of the library, for want of the software accelerator; see :attr:`reason`."""
        return self.verdict is Verdict.UNTESTABLE

    @property
    def blocked_by(self) -> str:
        """The id of the known issue that stopped a ``blocked`` suite; empty for other verdicts."""
        return str(self.evidence.get("blocked_by", "")) if self.verdict is Verdict.BLOCKED else ""

    @property
    def reason(self) -> str:
        """Why there is nothing to test, or why it could not be; empty for other verdicts."""
        return str(self.evidence.get("reason", "")) if self.verdict in (Verdict.ABSENT, Verdict.UNTESTABLE) else ""

    def to_json(self) -> str:
        """One line, without a line break."""
        return json.dumps(
            {
                "issue": self.issue,
                "subject": self.subject,
                "strategy": self.strategy,
                "verdict": self.verdict.value,
                "expected": None if self.expected is None else self.expected.value,
                # NaN and infinity are kept as texts, so that the line stays valid JSON.
                "evidence": _finite(self.evidence),
                "seconds": round(self.seconds, 3),
                **({"provenance": self.provenance} if self.provenance else {}),
            },
            allow_nan=False,
        )

    @classmethod
    def from_json(cls, line: str) -> Record:
        """The inverse of :meth:`to_json`.

        Raises:
            RecordError: when the line is not JSON, or lacks a field, or has one of another type, or names an unknown
                verdict.
        """
        from pytest_trlcompat._provenance import Provenance  # most processes read no verdict

        try:
            raw = parse(line)
            if not isinstance(raw, dict):
                raise Unreadable("it is no object")
            missing = [name for name in _FIELDS if name not in raw]
            if missing:
                raise Unreadable(f"it has no field {', '.join(missing)}")
            expected = raw["expected"]
            return cls(
                issue=_named(raw, "issue"),
                subject=_one_of(raw, "subject", SUBJECTS),
                strategy=_named(raw, "strategy"),
                verdict=Verdict(_one_of(raw, "verdict", _VERDICTS)),
                expected=None if expected is None else Verdict(_one_of(raw, "expected", _VERDICTS)),
                evidence=_evidence(raw["evidence"]),
                seconds=_seconds(raw["seconds"]),
                provenance=str(Provenance.parse(str(raw.get("provenance", "")))),
            )
        except Unreadable as error:
            from pytest_trlcompat._secrets import redacted

            shown = redacted(line)[:_SHOWN]
            raise RecordError(f"not a verdict line ({error}): {shown!r}") from error

    def without_secrets(self, redactor: Redactor | None = None) -> Record:
        """The record as it may be kept and shown, see :mod:`pytest_trlcompat._secrets`."""
        from pytest_trlcompat._secrets import Redactor

        return replace(self, evidence=(redactor or Redactor()).values(self.evidence, keep=ATTRIBUTED))


_FIELDS = ("issue", "subject", "strategy", "verdict", "expected", "evidence", "seconds")
_VERDICTS = tuple(verdict.value for verdict in Verdict)


def _named(raw: Mapping[str, Any], name: str) -> str:
    value = raw[name]
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise Unreadable(f"its {name} is no name")
    return value


def _one_of(raw: Mapping[str, Any], name: str, values: tuple[str, ...]) -> str:
    value = raw[name]
    if not isinstance(value, str) or value not in values:
        raise Unreadable(f"its {name} is none of {', '.join(values)}")
    return value


def _evidence(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Unreadable("its evidence is no object")
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _LONGEST_TIME:
        raise Unreadable("its seconds are no number of seconds")
    return float(value)


_LONGEST_TIME = 1e9
"""Seconds; more than 30 years."""


_LOCK_PATIENCE = 5.0
"""Seconds in which another worker has certainly written its line."""
_LOCK_POLL = 0.01
_held_by_others: set[Path] = set()


def is_wrong(record: Record) -> bool:
    """Whether a verdict is not the predicted one, or is a failure that nothing predicted."""
    return not record.as_predicted or (record.expected is None and record.verdict in (Verdict.ERROR, Verdict.HANG))


def append_record(path: Path, record: Record) -> None:
    """Append one whole line, or nothing: parallel pytest workers and full disks leave no torn line.

    Raises:
        OSError: with ``errno.ENOSPC`` where the disk is full.
        PermissionError: the file belongs to a user who is neither this one, nor root, nor the owner of its folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = (record.to_json() + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if (owner := os.fstat(descriptor).st_uid) not in (0, os.geteuid(), path.parent.stat().st_uid):
            raise PermissionError(errno.EPERM, f"it belongs to the user with the id {owner}", str(path))
        # Whoever can read a file can lock it, and results are meant to be read; so a lock that is held for longer than
        # any worker holds it is not waited for. Each line is one write at the end of the file in any case.
        is_alone = _lock_for_a_while(descriptor, path)
        before = os.fstat(descriptor).st_size
        written = os.write(descriptor, data)
        if written != len(data):
            # Without the lock another worker may have written its line behind this one.
            if is_alone:
                os.ftruncate(descriptor, before)
            raise OSError(errno.ENOSPC, "no space left for a verdict", str(path))
    finally:
        os.close(descriptor)


def _lock_for_a_while(descriptor: int, path: Path) -> bool:
    """Whether the lock is ours; not where another process holds it for longer than a line takes."""
    # Once is enough: to wait again for each of thousands of verdicts would take hours.
    deadline = time.monotonic() + (0 if path in _held_by_others else _LOCK_PATIENCE)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                _held_by_others.add(path)
                return False
            time.sleep(_LOCK_POLL)
        else:
            return True


def read_records(path: Path) -> list[Record]:
    """All verdicts of a results file, the newest of each key; a torn last line of a killed run is passed over.

    Raises:
        RecordError: for any other line that is no verdict, with its number, or a file that cannot be read.
    """
    scanned = scan_records(path)
    if scanned.problems:
        raise RecordError(f"{path}{scanned.problems[0]}")
    return list(scanned.records)


@dataclass(frozen=True)
class Scan:
    """What stands in a results file.

    Attributes:
        records: the newest verdict of each key.
        problems: what could not be read, as it follows the path: ``, line 3: not a verdict line ...`` or
            ``: it is a folder``.
        torn: the same of a last line without its end, as a killed run leaves it, which is none of ``problems``; empty
            where there is none.
    """

    records: tuple[Record, ...]
    problems: tuple[str, ...] = ()
    torn: str = ""


def scan_records(path: Path) -> Scan:
    """What can be read of a results file, whatever else it holds; nothing where there is no such file."""
    newest: dict[tuple[str, str, str], Record] = {}
    problems: list[str] = []
    torn = ""
    try:
        for number, line, whole in lines_of(path):
            try:
                if isinstance(line, Unreadable):
                    raise RecordError(f"not a verdict line ({line})")
                if line.strip():
                    record = Record.from_json(line)
                    newest[record.key] = record
            except RecordError as error:
                problem = f", line {number}: {error}"
                if whole:
                    problems.append(problem)
                else:
                    torn = problem
    except FileNotFoundError:
        pass
    except Unreadable as error:
        problems.append(f": {error}")
    except OSError as error:  # a disk that cannot be read any further
        problems.append(f": {error.strerror}")
    return Scan(tuple(newest.values()), tuple(problems), torn)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value
