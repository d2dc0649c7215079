"""What a command on a cluster and its nodes tell each other."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Cancelled",
    "CellTask",
    "Done",
    "Ended",
    "Event",
    "Failed",
    "Line",
    "Lost",
    "NodeReport",
    "NodeTask",
    "ProgramEnd",
    "Resolved",
    "Started",
    "State",
    "TaskEvent",
    "Verdicts",
]


# By keywords alone: fields of a subclass that have no default may then follow these, which have one.
@dataclass(frozen=True, kw_only=True)
class NodeTask:
    """What a node needs to run any program of this project, in addition to the project's files.

    Attributes:
        variables: the driver's ``TRLCOMPAT_`` settings, in place of the node's.
        requirements: of the program, where the node's Python lacks them.
        cache: the folder of environments, where the node does not name its own.
        files: the digest of this project's files, those of the driver.
        own_caches: whether uv's cache and that of compiled extensions are in that folder too, unless the node names
            them.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    requirements: tuple[str, ...] = ()
    cache: str | None = None
    files: str | None = None
    own_caches: bool = True


@dataclass(frozen=True)
class CellTask(NodeTask):
    """What a node needs to run a cell.

    Attributes:
        pins, date, python: of the cell.
        sweep: the name of the command.
        lock: that of a cell which has none in the repository, if it was resolved before.
        verdicts, state: what an interrupted run of the cell has left.
    """

    id: str
    pins: Mapping[str, str]
    date: str | None
    python: str | None
    sweep: str
    issues: tuple[str, ...] = ()
    pytest_arguments: tuple[str, ...] = ()
    lock: str | None = None
    verdicts: str = ""
    state: str | None = None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CellTask:
        raw: dict[str, Any] = json.loads(text)
        for name in ("issues", "pytest_arguments", "requirements"):
            raw[name] = tuple(raw[name])
        return cls(**raw)


@dataclass(frozen=True)
class Started:
    """A node has begun with a cell."""

    node: str
    host: str


@dataclass(frozen=True)
class Line:
    """A message for people."""

    text: str


@dataclass(frozen=True)
class Verdicts:
    """A part of the cell's verdicts, of whole lines: what stands in their file from a position on, in bytes."""

    position: int
    text: str


@dataclass(frozen=True)
class State:
    """The cell's sidecar."""

    text: str


@dataclass(frozen=True)
class Resolved:
    """The lock of a cell that has none in the repository."""

    text: str


@dataclass(frozen=True)
class Ended:
    """The process that ran the cell has ended.

    Attributes:
        status: its exit status, negative for death by a signal.
        output: the end of what it printed.
        error: why the cell could not be run; no fault of the cell.
        out_of_space: whether the node's disk was too full for the cell's environment.
    """

    status: int
    output: str
    error: str | None = None
    out_of_space: bool = False


Event = Started | Line | Verdicts | State | Resolved | Ended
"""What a task yields."""


@dataclass(frozen=True)
class ProgramEnd:
    """A program other than a cell has ended.

    Attributes:
        status: its exit status, negative for death by a signal.
        output: the end of what it printed.
        result: what it has written as its result; ``None`` where it did not come so far.
    """

    status: int
    output: str
    result: str | None


@dataclass(frozen=True)
class Done:
    """The task has ended, after its last event."""


@dataclass(frozen=True)
class Lost:
    """The task has ended with its node or its worker process."""

    why: str


@dataclass(frozen=True)
class Failed:
    """The task could not be run; no fault of the cell."""

    why: str


@dataclass(frozen=True)
class Cancelled:
    """The task was cancelled."""


TaskEvent = Event | Done | Lost | Failed | Cancelled


@dataclass(frozen=True)
class NodeReport:
    """What a node is, and has.

    Attributes:
        environments: names of the cells' environments that it has built.
        problem: why cells cannot run on it; ``None`` if they can.
    """

    node: str
    host: str
    cache: str
    environments: tuple[str, ...] = ()
    problem: str | None = None
