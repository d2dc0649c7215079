"""A cell's files in ``build/compat`` as they are on the node that runs it."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from pytest_trlcompat.matrix.engines.messages import CellTask, Ended, Event, Resolved, Started, State, Verdicts
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.files import locked, write_whole
from pytest_trlcompat.matrix.results import INTERRUPTED, RUNNING, Sidecar, read_sidecar
from pytest_trlcompat.matrix.sweep import Sweep

__all__ = ["Mirror"]


@dataclass
class Mirror:
    """The files of one cell, which no other process writes meanwhile.

    Attributes:
        sent: the verdicts that the node was given, so that it goes on after them.
    """

    sweep: Sweep
    cell_id: str
    sent: str = ""
    _held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def verdicts(self) -> Path:
        return self.sweep.layout.results / f"{self.cell_id}.jsonl"

    @property
    def state(self) -> Path:
        return self.sweep.layout.results / f"{self.cell_id}.cell.json"

    @property
    def log(self) -> Path:
        """The end of what the cell printed, where it was not finished."""
        return self.sweep.layout.results / f"{self.cell_id}.log"

    def with_earlier(self, task: CellTask, *, fresh: bool) -> CellTask:
        """The task with what an interrupted run has left of the cell, and with the lock that was resolved for it.

        Raises:
            MatrixError: for a damaged sidecar.
        """
        resolved = self.sweep.layout.resolved / f"{self.cell_id}.txt"
        lock = resolved.read_text(encoding="utf-8") if resolved.is_file() else None
        self.sent = ""
        state = None
        left = not fresh and self.state.exists() and self.verdicts.exists()
        if left and read_sidecar(self.state).state in (RUNNING, INTERRUPTED):
            state = self.state.read_text(encoding="utf-8")
            self.sent = _whole_lines(self.verdicts)
        return dataclasses.replace(task, lock=lock, verdicts=self.sent, state=state)

    def apply(self, event: Event) -> bool:
        """Write what an event says; returns whether the files are still those that the node was given.

        Raises:
            MatrixError: a part of the verdicts is missing.
        """
        if isinstance(event, Started):
            return self._begin()
        if isinstance(event, Verdicts):
            self._write_verdicts(event)
        elif isinstance(event, State):
            write_whole(self.state, event.text)
        elif isinstance(event, Resolved):
            write_whole(self.sweep.layout.resolved / f"{self.cell_id}.txt", event.text)
        return True

    def end(self, event: Ended | None) -> Sidecar | None:
        """The cell's sidecar after the last event of its run; keeps what it printed, where it was not finished.

        Raises:
            MatrixError: for a damaged sidecar.
        """
        sidecar = read_sidecar(self.state) if self.state.exists() else None
        unfinished = sidecar is None or sidecar.state in (RUNNING, INTERRUPTED)
        if event is not None and unfinished and event.output:
            write_whole(self.log, event.output)
        elif not unfinished:
            self.log.unlink(missing_ok=True)
        return sidecar

    def give_up(self, blank: Sidecar, state: str, reason: str) -> None:
        """Write that the cell did not end, and why.

        Args:
            blank: the sidecar of a cell of which nothing is known.
        """
        # A damaged sidecar is replaced, and one of an earlier command says nothing of this run.
        with contextlib.suppress(MatrixError):
            earlier = read_sidecar(self.state) if self.state.exists() else blank
            blank = earlier if earlier.sweep == blank.sweep else blank
        write_whole(self.state, dataclasses.replace(blank, state=state, reason=reason).to_json())

    def release(self) -> None:
        """Let other processes write the files."""
        self._held.close()

    def _begin(self) -> bool:
        results = self.sweep.layout.results
        # A run that is repeated still holds the lock, and would wait for itself: flock counts by open files.
        self._held.close()
        self._held.enter_context(locked(results / f".{self.cell_id}.lock"))
        self.sweep.begin_cell(self.cell_id)
        if not self.sent:
            self.verdicts.unlink(missing_ok=True)
            return True
        whole = _whole_lines(self.verdicts) if self.verdicts.exists() else ""
        return whole == self.sent

    def _write_verdicts(self, event: Verdicts) -> None:
        self.verdicts.parent.mkdir(parents=True, exist_ok=True)
        with open(self.verdicts, "ab") as file:
            # Opened for appending, so this is the length of the file.
            if file.tell() < event.position:
                raise MatrixError(
                    f"{self.verdicts}: {file.tell()} bytes, but the next verdicts belong at {event.position}; "
                    "something else has changed it. Remove it and run the cell again"
                )
            # What a lost run has written behind this position is measured again.
            file.truncate(event.position)
            file.write(event.text.encode())


def _whole_lines(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MatrixError(f"{path}: not UTF-8 ({error}); remove it and run the cell again") from error
    return text[: text.rfind("\n") + 1]
