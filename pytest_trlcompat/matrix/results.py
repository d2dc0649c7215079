"""The results of a cell: its verdicts, and a sidecar with the state of its run. Imports only the standard library."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pytest_trlcompat.catalog.verdict import Record, Verdict, is_wrong
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout

__all__ = [
    "INTERRUPTED",
    "RUNNING",
    "TESTED",
    "UNTESTABLE",
    "Outcome",
    "Sidecar",
    "read_sidecar",
    "read_sidecars",
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

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


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
        return None


def read_sidecars(layout: Layout) -> list[Sidecar]:
    """The sidecars of all cells with results."""
    return [read_sidecar(path) for path in sorted(layout.results.glob("*.cell.json"))]


def read_sidecar(path: Path) -> Sidecar:
    """Read a sidecar.

    Raises:
        MatrixError: when it is damaged.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return Sidecar(**{**raw, "issues": tuple(raw["issues"])})
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise MatrixError(f"{path}: damaged ({error}); remove it and run the cell again") from error
