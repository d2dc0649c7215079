"""A cell, or another program of this project, as a task of a node: starts its process, and passes on what it writes.

Imports only the standard library and the matrix, so that it can be tried without Ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_trlcompat.matrix import process
from pytest_trlcompat.matrix.engines.cell_process import END, LINES, TASK
from pytest_trlcompat.matrix.engines.messages import (
    CellTask,
    Ended,
    Event,
    Line,
    NodeTask,
    ProgramEnd,
    Resolved,
    Started,
    State,
    Verdicts,
)
from pytest_trlcompat.matrix.engines.node import check_files, checked_cache, interpreter, run_folder, variables
from pytest_trlcompat.matrix.errors import MatrixError

__all__ = ["RESULT", "NodeLost", "cell_events", "run_program"]

RESULT = "result.json"
"""The file of the run in which a program leaves its result."""

_POLL = 0.25
"""Seconds between two looks at what the cell has written."""
_OUTPUT = 50_000
"""Characters of the end of its output, which are sent when it has ended."""
_GRACE = 3.0
"""Seconds in which a cell that is cancelled may end by itself."""


class NodeLost(MatrixError):
    """The process that has started this one has ended, and with it the node, although this process still runs."""


def cell_events(task: CellTask, node: str) -> Iterator[Event]:
    """Run a cell in a process of its own.

    Args:
        node: the name of this node, which the first event has.

    Raises:
        NodeLost: when the process that has started this one ends, after all processes of the cell have ended.
        MatrixError: when nothing can be run on this node.
        KeyboardInterrupt: when it is cancelled, after all processes have ended.
    """
    check_files(task.files)
    yield Started(node, socket.gethostname())
    with _started(task, "pytest_trlcompat.matrix.engines.cell_process", task.to_json()) as program:
        written = _Written(program.run, task)
        while program.runs():
            yield from written.since_before()
        yield from written.since_before()
        end = _end(program.run)
        yield Ended(program.status, program.printed(), end.get("error"), bool(end.get("out_of_space")))


def run_program(task: NodeTask, module: str, text: str) -> ProgramEnd:
    """Run another program of this project in a process of its own: ``python -m MODULE CACHE`` in the folder of the run.

    Args:
        module: reads ``task.json`` and writes ``result.json`` (:data:`RESULT`).
        text: the contents of ``task.json``.

    Raises:
        NodeLost, MatrixError, KeyboardInterrupt: as for :func:`cell_events`.
    """
    check_files(task.files)
    with _started(task, module, text) as program:
        while program.runs():
            pass
        return ProgramEnd(program.status, program.printed(), _text(program.run / RESULT))


@dataclass
class _Program:
    """A process that has been started in the folder of its run."""

    run: Path
    output: Path
    child: subprocess.Popen[bytes]
    parent: int

    def runs(self) -> bool:
        """Wait for a moment; whether it still runs.

        Raises:
            NodeLost: when the process that has started this one has ended.
        """
        if _has_ended(self.child):
            return False
        if os.getppid() != self.parent:  # a worker of Ray would go on with its task
            raise NodeLost("the node's own process of Ray has ended")
        return True

    @property
    def status(self) -> int:
        assert self.child.returncode is not None
        return self.child.returncode

    def printed(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")[-_OUTPUT:]


@contextlib.contextmanager
def _started(task: NodeTask, module: str, text: str) -> Iterator[_Program]:
    """A program's process; at the end nothing of it is left, neither processes nor files."""
    # Asked first: installing an interpreter takes a while, and Ray may end meanwhile.
    parent = os.getppid()
    cache = checked_cache(task.cache, of_its_own=task.own_caches)
    python = interpreter(cache, task.requirements)
    with run_folder(cache) as run:
        (run / TASK).write_text(text, encoding="utf-8")
        output = run / "output.txt"
        command = [str(python), "-m", module, str(cache)]
        with (
            open(output, "wb") as file,
            process.started(command, env=variables(task, cache), cwd=run, output=file, grace=_GRACE) as child,
        ):
            yield _Program(run, output, child, parent)


def _has_ended(child: subprocess.Popen[bytes]) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_POLL)
    return child.returncode is not None


def _end(run: Path) -> dict[str, str]:
    try:
        return dict(json.loads((run / END).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}  # it was killed


class _Written:
    """What a cell has written since the last look."""

    def __init__(self, run: Path, task: CellTask) -> None:
        self._verdicts = run / f"{task.id}.jsonl"
        self._state = run / f"{task.id}.cell.json"
        self._lock = run / "locks" / f"{task.id}.txt"
        self._lines = run / LINES
        self._earlier = task.verdicts.encode()
        self._position = len(self._earlier)
        self._said = 0
        self._sent_state = task.state
        self._sent_lock = task.lock

    def since_before(self) -> Iterator[Event]:
        lines = _whole_lines(self._lines, self._said)
        self._said += len(lines)
        for line in lines.decode("utf-8", "replace").splitlines():
            yield Line(line)
        # The state is read before the verdicts: those that it speaks of are in their file by then.
        lock, state = _text(self._lock), _text(self._state)
        if lock is not None and lock != self._sent_lock:
            self._sent_lock = lock
            yield Resolved(lock)
        if state is None:
            return
        if state != self._sent_state and not self._goes_on():
            # The cell has begun anew, so what was sent of the earlier run no longer counts.
            self._position = 0
            yield Verdicts(0, "")
        # Verdicts before the state, which says of them that they are all.
        data = _whole_lines(self._verdicts, self._position)
        if data:
            yield Verdicts(self._position, data.decode("utf-8"))
            self._position += len(data)
        if state != self._sent_state:
            self._sent_state = state
            yield State(state)

    def _goes_on(self) -> bool:
        """Whether the verdicts begin with those of the earlier run; asked once, when the cell writes its own state."""
        earlier, self._earlier = self._earlier, b""
        if not earlier:
            return True
        with contextlib.suppress(FileNotFoundError), open(self._verdicts, "rb") as file:
            return file.read(len(earlier)) == earlier
        return False


def _whole_lines(path: Path, position: int) -> bytes:
    """The lines of a file from a position on, without one that is not complete."""
    try:
        with open(path, "rb") as file:
            file.seek(position)
            data = file.read()
    except FileNotFoundError:
        return b""
    return data[: data.rfind(b"\n") + 1]


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
