"""The results of a cell: its verdicts, and a sidecar with the state of its run."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_trlcompat._json_files import Unreadable, check_version, parse, read_text
from pytest_trlcompat._secrets import redacted
from pytest_trlcompat.catalog.verdict import NAME, Record, RecordError, Verdict, is_wrong, read_records
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.untestable import lost

__all__ = [
    "INTERRUPTED",
    "RUNNING",
    "TESTED",
    "UNTESTABLE",
    "Outcome",
    "Sidecar",
    "read_sidecar",
    "read_sidecars",
    "scan_sidecar",
    "success",
]

TESTED = "tested"
UNTESTABLE = "untestable"
INTERRUPTED = "interrupted"
RUNNING = "running"

_NAMED = 3
"""How many wrong verdicts a message names; the report names all."""


@dataclass(frozen=True)
class Sidecar:
    """Facts about a cell other than its verdicts, in ``build/compat/<cell id>.cell.json``.

    Attributes:
        state: ``running`` until it has ended; without a process that holds its lock, it was killed.
        reason: why the cell is untestable or was interrupted.
        seconds: wall-clock time of all its runs, including the time to build the environment.
        digest: of all that its verdicts depend on; a run does not continue results with another digest.
        sweep: the command that ran it, see :class:`Sweep`.
        issues: the requested issues; empty: all.
        python: the cell's own interpreter; ``None``: the one of the matrix.
        provenance: code and packages that its verdicts must carry, see :mod:`pytest_trlcompat._provenance`; empty
            where it is not known.
    """

    id: str
    pins: Mapping[str, str]
    state: str
    sweep: str
    lock: Mapping[str, str] = field(default_factory=dict)
    date: str | None = None
    reason: str | None = None
    seconds: float = 0.0
    digest: str | None = None
    issues: tuple[str, ...] = ()
    schema: int = 1
    python: str | None = None
    provenance: str = ""

    def to_json(self) -> str:
        """Without secrets, which a resolver's reason may hold."""
        raw = dataclasses.asdict(self)
        return json.dumps({**raw, "reason": self.reason and redacted(self.reason)}, indent=1) + "\n"


@dataclass(frozen=True)
class Outcome:
    """How a cell ended, and its verdicts.

    Attributes:
        exit_status: pytest's; ``None`` if it was not started.
        out_of_space: whether the disk was too full for its environment; the same command then continues with it.
    """

    sidecar: Sidecar
    records: tuple[Record, ...]
    exit_status: int | None = None
    out_of_space: bool = False

    @classmethod
    def read(cls, sidecar: Sidecar, verdicts: Path) -> Outcome:
        """How a cell ended that another process has run.

        Raises:
            MatrixError: its verdicts cannot be read.
        """
        try:
            return cls(sidecar, () if sidecar.state == UNTESTABLE else tuple(read_records(verdicts)))
        except RecordError as error:
            raise MatrixError(f"{error}; remove the file and run the cell again") from error

    @property
    def wrong(self) -> list[Record]:
        """Verdicts that differ from their prediction, and unpredicted failures."""
        return [record for record in self.records if is_wrong(record)]

    @property
    def problem(self) -> str | None:
        """Why the cell's session fails, in one message; ``None`` if all verdicts are as predicted."""
        cell_id = self.sidecar.id
        if self.sidecar.state == UNTESTABLE:
            return f"{cell_id} is untestable: {self.sidecar.reason}"
        if self.sidecar.state != TESTED:
            return f"{cell_id} was not finished: {self.sidecar.reason}"
        if self.wrong:
            named = [
                f"{record.issue} {record.subject} {record.strategy} is {record.verdict}"
                + (f", predicted {record.expected}" if record.expected else "")
                for record in self.wrong
            ]
            more = [f"and {len(named) - _NAMED} more"] if len(named) > _NAMED else []
            return f"{cell_id}: {len(named)} of {len(self.records)} verdicts are not as predicted: " + "; ".join(
                [*named[:_NAMED], *more]
            )
        if not self.records:
            return f"{cell_id}: no suite gave a verdict"
        untested = [record for record in self.records if record.untested]
        if untested and all(record.untested or record.verdict is Verdict.ABSENT for record in self.records):
            return f"{cell_id}: nothing could be tested. {untested[0].reason}"
        if missing := lost(self.records, self.sidecar.lock):
            first = missing[0]
            return (
                f"{cell_id}: {len(missing)} of {len(self.records)} verdicts were measured and published, and cannot be "
                f"measured now: {first.issue} {first.subject} {first.strategy}. {first.reason} If that is to stay, "
                "list it with its reason in fixtures/untestable.toml"
            )
        return None


def success(outcome: Outcome) -> str:
    """A line about a cell without a problem."""
    untested = sum(record.untested for record in outcome.records)
    count = len(outcome.records) - untested
    text = (
        f"{outcome.sidecar.id}: {count} verdict{'' if count == 1 else 's'} in {outcome.sidecar.seconds:.0f} s, "
        "all as predicted"
    )
    unpredicted = sum(record.expected is None and not record.untested for record in outcome.records)
    if unpredicted:
        text += f"; {unpredicted} without a prediction"
    if untested:
        text += f"; {untested} more could not be tested"
    return text


def read_sidecars(layout: Layout) -> list[Sidecar]:
    """The sidecars of all cells with results, but those that are damaged, which are reported when their cells run."""
    sidecars = []
    for path in sorted(layout.results.glob("*.cell.json")):
        with contextlib.suppress(MatrixError):
            sidecars.append(read_sidecar(path))
    return sidecars


def read_sidecar(path: Path) -> Sidecar:
    """Read a sidecar.

    Raises:
        MatrixError: when it is damaged.
    """
    sidecar, problems = scan_sidecar(path)
    if problems:
        raise _damaged(path, problems[0])
    return sidecar


def scan_sidecar(path: Path) -> tuple[Sidecar, list[str]]:
    """What can be read of a sidecar, and what cannot: this is left out.

    Raises:
        MatrixError: when it does not say which cell it is of, with which pins, or in which state.
    """
    problems: list[str] = []
    try:
        raw = parse(read_text(path))
        if not isinstance(raw, dict):
            raise Unreadable("it is no object")
        fields = {name: _checked(name, raw, problems) for name in _KINDS if name in raw}
        if unknown := sorted(set(raw) - set(_KINDS)):
            problems.append(f"there is no field {unknown[0]!r}")
        if missing := [name for name in _NEEDED if name not in fields]:
            raise Unreadable(f"there is no field {missing[0]!r}")
        if f"{fields['id']}.cell.json" != path.name:
            raise Unreadable(f"it is of the cell {fields['id']}")
    except Unreadable as error:
        raise _damaged(path, str(error)) from error
    return Sidecar(**{name: value for name, value in fields.items() if value is not _LEFT_OUT}), problems


def _damaged(path: Path, problem: str) -> MatrixError:
    return MatrixError(f"{path}: damaged ({problem}); remove it and run the cell again")


_LEFT_OUT = object()
_NEEDED = ("id", "pins", "state", "sweep", "issues")


def _checked(name: str, raw: Mapping[str, Any], problems: list[str]) -> Any:
    """A field as :class:`Sidecar` has it; :data:`_LEFT_OUT`, and a problem, where it is not of its kind.

    Raises:
        Unreadable: it is not of its kind, and one of those without which nothing can be said of the cell.
    """
    value = raw[name]
    try:
        # A damaged version costs that package alone, not the whole lock.
        if name == "lock":
            return _lock(value, problems)
        return _KINDS[name](value)
    except Unreadable as error:
        if name in _NEEDED:
            raise Unreadable(f"{name!r} {error}") from error
        problems.append(f"{name!r} {error}")
        return _LEFT_OUT


def _lock(value: Any, problems: list[str]) -> dict[str, str]:
    if not isinstance(value, dict):
        raise Unreadable("is no object")
    versions = {}
    for package, version in value.items():
        try:
            versions.update(_pins({package: version}))
        except Unreadable as error:
            problems.append(f"'lock' {error}")
    return versions


def _pins(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise Unreadable("is no object")
    for package, version in value.items():
        if not NAME.fullmatch(package):
            raise Unreadable(f"names a package {package[:100]!r}")
        check_version(package, version)
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise Unreadable(f"is no name: {str(value)[:100]!r}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Unreadable(f"is no text: {str(value)[:100]!r}")
    return value


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _text(value)


def _state(value: Any) -> str:
    if value not in (TESTED, UNTESTABLE, INTERRUPTED, RUNNING):
        raise Unreadable(f"is no state: {str(value)[:100]!r}")
    return str(value)


def _day_or_none(value: Any) -> str | None:
    try:
        return None if value is None else datetime.date.fromisoformat(_text(value)).isoformat()
    except ValueError as error:
        raise Unreadable(f"is no day: {str(value)[:100]!r}") from error


def _number(value: Any) -> float:
    # A bool is an int in Python, and no number of seconds. NaN fails the comparison.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise Unreadable(f"is no number of seconds: {str(value)[:100]!r}")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise Unreadable("is no list")
    return tuple(map(_text, value))


def _schema(value: Any) -> int:
    if value != 1 or isinstance(value, bool):
        raise Unreadable(f"is none that is known here: {str(value)[:100]!r}")
    return int(value)


_KINDS = {
    "id": _name,
    "pins": _pins,
    "state": _state,
    "sweep": _text,
    "lock": _pins,
    "date": _day_or_none,
    "reason": _text_or_none,
    "seconds": _number,
    "digest": _text_or_none,
    "issues": _texts,
    "schema": _schema,
    "python": _text_or_none,
    "provenance": _text,
}
"""The fields of a sidecar, and what each must be."""
