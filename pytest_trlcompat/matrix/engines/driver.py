"""The driver of a sweep: submits the cells that have to run, writes their results, runs a lost cell once more.

What runs them is a :class:`Streams`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pytest_trlcompat.matrix import locks
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.engines.messages import (
    Cancelled,
    CellTask,
    Done,
    Ended,
    Failed,
    Line,
    Lost,
    Started,
    TaskEvent,
)
from pytest_trlcompat.matrix.engines.mirror import Mirror
from pytest_trlcompat.matrix.engines.nodes import Nodes, Troubles
from pytest_trlcompat.matrix.engines.progress import Progress
from pytest_trlcompat.matrix.environments import name_of
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.job import finished_before
from pytest_trlcompat.matrix.results import INTERRUPTED, RUNNING, UNTESTABLE, Outcome, Sidecar, success
from pytest_trlcompat.matrix.suite_run import code_digest
from pytest_trlcompat.matrix.sweep import Sweep

__all__ = ["Driver", "Streams"]

_WAIT = 1.0
_PATIENCE = 10.0
"""Seconds in which cells that are cancelled may end."""

Say = Callable[[str], None]


class Streams(Protocol):
    """Runs cells somewhere, and passes on their events as they come; see :class:`.ray_streams.RayStreams`."""

    def start(self, task: CellTask, preferred: Collection[str], avoided: Collection[str]) -> None: ...

    def poll(self, seconds: float) -> list[tuple[str, TaskEvent]]: ...

    def cancel(self) -> None: ...


@dataclass
class _Run:
    """A cell that was submitted."""

    cell: Cell
    task: CellTask
    mirror: Mirror
    host: str = ""
    node: str = ""
    running: bool = False
    changed: bool = False
    ended: Ended | None = None
    troubles: Troubles = field(default_factory=Troubles)


@dataclass
class Driver:
    """One command.

    Attributes:
        template: what all cells' tasks have in common.
        costs: seconds of cells, as far as they are known.
        nodes: those of the cluster.
        limit: cells that are submitted at a time. Looking for the next event takes time in proportion to their number.
        tests: by a cell's id, which tests of the suites run in it; see :class:`.request.Request`.
    """

    matrix: Matrix
    sweep: Sweep
    streams: Streams
    template: CellTask
    costs: Mapping[str, float]
    nodes: Nodes
    say: Say
    now: Callable[[], float] = time.monotonic
    limit: int = 1000
    tests: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._runs: dict[str, _Run] = {}

    def run(self, cells: Sequence[Cell], *, fresh: bool = False) -> None:
        """Run the cells that an interrupted sweep has not finished, those that take longest first.

        Raises:
            MatrixError: no node can run any; a results file is damaged; a cell's files cannot be written.
            KeyboardInterrupt: after the cells that ran have ended; finished verdicts are kept.
        """
        self.nodes.check(self.say)
        left = self._without_finished(cells, fresh)
        progress = Progress([cell.id for cell in left], self.costs, self.now())
        try:
            # A cell of which nothing is known may be the longest: it starts first.
            waiting = deque(sorted(left, key=lambda cell: -self.costs.get(cell.id, float("inf"))))
            while waiting or self._runs:
                while waiting and len(self._runs) < self.limit:
                    cell = waiting.popleft()
                    self._runs[cell.id] = run = _Run(cell, self._task(cell), Mirror(self.sweep, cell.id))
                    self._submit(run, fresh=fresh)
                for cell_id, event in self.streams.poll(_WAIT):
                    self._handle(self._runs[cell_id], event, progress)
        # Also Ctrl-C: nothing goes on running, and finished verdicts are kept.
        except BaseException:
            self._stop()
            raise

    def _task(self, cell: Cell) -> CellTask:
        date = cell.date.isoformat() if cell.date else None
        common = {name: value for name, value in vars(self.template).items() if name not in ("id", "pins")}
        of_cell = {"id": cell.id, "pins": dict(cell.pins), "date": date, "python": cell.python}
        return CellTask(**{**common, **of_cell, "pytest_arguments": self._pytest_arguments(cell)})

    def _pytest_arguments(self, cell: Cell) -> tuple[str, ...]:
        chosen = ("-m", self.tests[cell.id]) if cell.id in self.tests else ()
        return (*chosen, *self.template.pytest_arguments)

    def _without_finished(self, cells: Sequence[Cell], fresh: bool) -> list[Cell]:
        if fresh:
            return list(cells)
        code = code_digest(self.sweep.layout)
        left = []
        for cell in cells:
            lock = self._lock(cell)
            chosen = {"issues": self.template.issues, "pytest_arguments": self._pytest_arguments(cell)}
            if lock is None or finished_before(self.matrix, cell, self.sweep, lock, code, **chosen) is None:
                left.append(cell)
        if finished := len(cells) - len(left):
            self.say(
                f"{finished} of {len(cells)} cells were finished before; their verdicts are reused (not with --fresh)"
            )
        return left

    def _lock(self, cell: Cell) -> locks.Lock | None:
        """The lock of a cell, if it is known without asking the package index."""
        return locks.known(self.matrix, cell, self.sweep.layout)

    def _submit(self, run: _Run, *, fresh: bool = False) -> None:
        run.task = run.mirror.with_earlier(run.task, fresh=fresh)
        run.running, run.changed, run.ended = False, False, None
        lock = self._lock(run.cell)
        environment = name_of(lock, self.sweep.layout) if lock else None
        self.streams.start(run.task, self.nodes.having(environment), self.nodes.avoided)

    def _handle(self, run: _Run, event: TaskEvent, progress: Progress) -> None:
        if isinstance(event, Started):
            run.node, run.host, run.running = event.node, event.host, True
            # Until a node has begun, other commands may write the cell's files; it was given what they held before.
            run.changed = not run.mirror.apply(event)
        elif isinstance(event, Line):
            self.say(f"{event.text} [{run.host}]")
        elif isinstance(event, Ended):
            run.ended = event
        elif isinstance(event, Lost):
            self._lost(run, event.why, progress)
        elif isinstance(event, Failed):
            self._failed(run, event.why, progress)
        elif isinstance(event, (Done, Cancelled)):
            self._done(run, progress)
        # Else these would be written over what another command has measured meanwhile.
        elif not run.changed:
            run.mirror.apply(event)

    def _done(self, run: _Run, progress: Progress) -> None:
        if run.changed:
            self.say(f"{run.cell.id}: another command has run it meanwhile; it is run again")
            self._again(run)
        elif run.ended is None:
            self._failed(run, "its task ended without a result", progress)
        elif run.ended.error is not None:
            self._failed(run, run.ended.error, progress)
        elif run.ended.status < 0:
            self._lost(run, f"its process was killed by signal {-run.ended.status}", progress)
        elif run.ended.status != 0:
            last = "".join(run.ended.output.strip().splitlines()[-1:])
            self._failed(run, f"its process ended with exit status {run.ended.status}: {last}", progress)
        else:
            self._finish(run, progress, stays=run.ended.out_of_space)

    def _lost(self, run: _Run, why: str, progress: Progress) -> None:
        if run.troubles.add(run.host or "a node", why):
            self.say(f"{run.cell.id}: lost ({run.troubles.last}); goes on elsewhere after its last verdict")
            self._again(run)
        else:
            run.mirror.give_up(self._blank(run), UNTESTABLE, f"what ran it was lost each time: {run.troubles}")
            self._finish(run, progress)

    def _failed(self, run: _Run, why: str, progress: Progress) -> None:
        """No fault of the cell: the node, if it is known, gets no more of them."""
        more = run.troubles.add(run.host or "a node", why)
        self.nodes.avoid(run.node)
        if more and self.nodes.usable:
            self.say(f"{run.cell.id}: not run ({run.troubles.last}); tried elsewhere")
            self._again(run)
        else:
            run.mirror.give_up(self._blank(run), INTERRUPTED, str(run.troubles))
            self._finish(run, progress, stays=True)

    def _again(self, run: _Run) -> None:
        run.mirror.release()
        # Not fresh, whatever the command says: the verdicts of the lost run are of this command.
        self._submit(run)

    def _finish(self, run: _Run, progress: Progress, *, stays: bool = False) -> None:
        """
        Args:
            stays: the cell did not end, and the same command continues with it.
        """
        sidecar = run.mirror.end(run.ended)
        if not stays:
            self.sweep.end_cell(run.cell.id)
        run.mirror.release()
        del self._runs[run.cell.id]
        done = progress.ended(run.cell.id, self.now())
        self.say(f"{done}; {_summary(run, sidecar)}")

    def _blank(self, run: _Run) -> Sidecar:
        pins = dict(self.matrix.all_pins(run.cell))
        return Sidecar(run.cell.id, pins, RUNNING, self.sweep.name, issues=self.template.issues, python=run.cell.python)

    # The end

    def _stop(self) -> None:
        """End what runs, and keep what comes meanwhile."""
        started = [run for run in self._runs.values() if run.running]
        self.streams.cancel()
        deadline = self.now() + _PATIENCE
        open_runs = {run.cell.id for run in started}
        while open_runs and self.now() < deadline:
            for cell_id, event in self.streams.poll(_WAIT):
                run = self._runs[cell_id]
                if isinstance(event, (Done, Cancelled, Lost, Failed)):
                    open_runs.discard(cell_id)
                elif not run.changed and not isinstance(event, (Started, Line, Ended)):
                    run.mirror.apply(event)
        for run in started:
            run.mirror.give_up(self._blank(run), INTERRUPTED, "it was stopped")
            run.mirror.release()
        if started:
            which = "1 running cell was" if len(started) == 1 else f"{len(started)} running cells were"
            whose = "its last verdict" if len(started) == 1 else "their last verdicts"
            self.say(f"{which} stopped; the same command continues after {whose}")


def _summary(run: _Run, sidecar: Sidecar | None) -> str:
    if sidecar is None:
        return f"{run.cell.id}: nothing is known of it"
    try:
        outcome = Outcome.read(sidecar, run.mirror.verdicts)
    except MatrixError as error:
        return str(error)
    text = outcome.problem or success(outcome)
    if sidecar.state == INTERRUPTED and run.mirror.log.exists():
        text += f" ({run.mirror.log})"
    return f"{text} [{run.host}]"
