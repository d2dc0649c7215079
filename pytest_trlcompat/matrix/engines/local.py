"""The cells of a command on this machine, side by side: each by one process of pytest or several, as there are places.

The sessions of nox run one after the other. The first one starts all cells of the command, and each waits for its own,
while the others go on.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_trlcompat.catalog.verdict import RecordError, read_records
from pytest_trlcompat.matrix import process
from pytest_trlcompat.matrix.cells import Cell
from pytest_trlcompat.matrix.claims import Group, GroupTable
from pytest_trlcompat.matrix.engines.first_answer import FirstAnswer
from pytest_trlcompat.matrix.engines.places import Place, Places
from pytest_trlcompat.matrix.engines.progress import Progress
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.files import explained_os_errors, write_whole
from pytest_trlcompat.matrix.job import CellJob, alone
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.results import Outcome, success
from pytest_trlcompat.matrix.sweep import Sweep

__all__ = ["LocalEngine", "keep_group_seconds", "known_seconds", "measured_costs"]

Say = Callable[[str], None]

_PAUSE = 0.2
"""Seconds between two looks at whether a process has ended."""
_LOOKS = 1.0
"""Seconds between two looks at what they have done, and at whether there is room for one more."""
_BETWEEN_LINES = 15.0
"""Seconds between two lines that say how far the sweep is."""
_WORTH = 15.0
"""Seconds of tests that one more process must find: it first imports the stack and collects the tests."""
_CRASHES = 1
"""How often a cell goes on after one of its processes was killed and none is left."""
_OUTPUT = 200_000
"""Characters of the end of what a process printed."""
_PLUGIN = "pytest_trlcompat.plugin.claiming"


@dataclass
class _Process:
    running: process.Running
    place: Place
    output: Path


@dataclass
class _Run:
    """A cell that runs.

    Attributes:
        exits: keeps others from the cell and its environment.
        statuses: of the processes that have ended.
        verdicts: the size of the results file when it was last read.
    """

    job: CellJob
    table: GroupTable
    exits: contextlib.ExitStack
    processes: list[_Process] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    outputs: list[Path] = field(default_factory=list)
    first_answer: FirstAnswer | None = None
    read: int = 0

    @property
    def cell_id(self) -> str:
        return self.job.cell.id

    @property
    def groups(self) -> list[Group]:
        return self.table.groups or []

    def open_seconds(self) -> float:
        """Of the groups that no process has begun; nothing while they are not known."""
        return sum(group.seconds for group in self.table.open(self.groups))

    def share(self) -> float:
        """How much of it is done, from 0 to 1."""
        groups = self.groups
        done = self.table.seconds(groups)
        whole = sum(group.seconds for group in groups)
        return sum(group.seconds for group in groups if group.name in done) / whole if whole else 0.0

    def owes_first_answer(self) -> bool:
        """Whether more processes would have the verdicts that matter most there sooner."""
        if self.first_answer is None or self.first_answer.is_complete:
            return False
        groups = self.table.groups
        return groups is None or any(group.is_first_answer for group in self.table.open(groups))


@dataclass(frozen=True)
class _End:
    """How a cell ended, and what its processes printed."""

    outcome: Outcome | MatrixError
    printed: Sequence[str] = ()


@dataclass
class LocalEngine:
    """
    Attributes:
        costs: seconds of cells, as far as they are known.
        newest: the id of the cell that runs first, and of which the verdicts that matter most are shown as they come.
    """

    sweep: Sweep
    places: Places
    costs: Mapping[str, float]
    say: Say
    newest: str = ""
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._waiting: list[tuple[Cell, Callable[[Cell, Sequence[Cell]], CellJob]]] = []
        self._runs: list[_Run] = []
        self._ends: dict[str, _End] = {}
        self._progress = Progress([], {}, 0.0)
        self._said = self._looked = 0.0

    @property
    def folder(self) -> Path:
        """What the processes of the cells share, which is removed with the cell."""
        return self.sweep.layout.results / ".running"

    def add(self, cells: Sequence[Cell], make: Callable[[Cell, Sequence[Cell]], CellJob]) -> None:
        """Have cells run, the newest first, then those that take longest.

        Args:
            make: the job of a cell, from it and the cells that run later.
        """
        # A cell of which nothing is known may be the longest.
        waiting = sorted(cells, key=lambda cell: (cell.id != self.newest, -self.costs.get(cell.id, float("inf"))))
        self._waiting += [(cell, make) for cell in waiting]
        self._progress = Progress([cell.id for cell in cells], self.costs, self.now())
        self._said = self.now()

    def knows(self, cell_id: str) -> bool:
        """Whether a cell was added."""
        return (
            cell_id in self._ends
            or any(run.cell_id == cell_id for run in self._runs)
            or any(cell.id == cell_id for cell, _ in self._waiting)
        )

    def wait(self, cell_id: str) -> Outcome:
        """Have the cells run until this one has ended; then show what its processes printed.

        Raises:
            MatrixError: for an error of the operating system, or a damaged results file.
            KeyboardInterrupt: after all processes of all cells have ended; finished verdicts are kept.
        """
        try:
            with process.signals_as_ctrl_c():
                while cell_id not in self._ends:
                    self._look()
                    if self.now() - self._looked >= _LOOKS or not self._runs:
                        self._looked = self.now()
                        self._start()
                        self._show()
                    if cell_id not in self._ends:
                        time.sleep(_PAUSE)
        # Also Ctrl-C: nothing goes on running, and finished verdicts are kept.
        except BaseException:
            self.stop()
            raise
        end = self._ends[cell_id]
        for number, text in enumerate(end.printed, start=1):
            which = f" (process {number} of {len(end.printed)})" if len(end.printed) > 1 else ""
            self.say(f"{cell_id}: what pytest printed{which}\n{text.rstrip()}")
        if isinstance(end.outcome, MatrixError):
            raise end.outcome
        return end.outcome

    def stop(self) -> None:
        """End what runs; its finished verdicts are kept."""
        # Emptied first: the session calls this again at its end, and finds nothing left to end.
        runs, self._runs, self._waiting = self._runs, [], []
        with process.deferred_signals():
            process.end([each.running for run in runs for each in run.processes])
            for run in runs:
                # The cells after this one are to be stopped as well.
                with contextlib.suppress(MatrixError, OSError):
                    run.job.stop()
                self._leave(run)

    # What has ended

    def _look(self) -> None:
        for run in list(self._runs):
            for each in [each for each in run.processes if each.running.child.poll() is not None]:
                process.end([each.running])  # what it has left running
                each.place.give_back()
                run.processes.remove(each)
                run.statuses.append(each.running.child.returncode)
                self._looked = 0.0  # its place is free
            if not run.processes and not self._goes_on(run):
                self._finish(run)

    def _goes_on(self, run: _Run) -> bool:
        """Whether a cell whose processes have all ended gets one more."""
        killed = [status for status in run.statuses if status < 0]
        # Exit statuses above 1 are pytest's own errors, which another process would meet as well.
        if not killed or len(killed) > _CRASHES or any(status > 1 for status in run.statuses):
            return False
        if run.table.groups is not None and len(run.table.seconds(run.groups)) == len(run.groups):
            return False
        place = self.places.take()
        if place is None:
            return True  # until there is one
        self.say(f"{run.cell_id}: pytest was killed by signal {-killed[-1]}; goes on with what it has not measured")
        self._start_process(run, place)
        return True

    def _finish(self, run: _Run) -> None:
        self._read_verdicts(run)
        done = run.table.seconds(run.groups)
        missing = [group.name for group in run.groups if group.name not in done]
        with contextlib.suppress(OSError):
            # Only the order of the next run depends on them.
            keep_group_seconds(self.sweep.layout, run.cell_id, done)
        try:
            outcome: Outcome | MatrixError = run.job.finish(_status(run, bool(missing)), _shortfall(run, missing))
        except MatrixError as error:
            # The cell's own session raises it, when its turn has come.
            outcome = error
        self._end(run.cell_id, outcome, [_tail(path) for path in run.outputs])
        self._runs.remove(run)
        self._leave(run)

    def _end(self, cell_id: str, outcome: Outcome | MatrixError, printed: Sequence[str] = ()) -> None:
        self._ends[cell_id] = _End(outcome, printed)
        done = self._progress.ended(cell_id, self.now())
        self.say(f"{done}; {outcome if isinstance(outcome, MatrixError) else outcome.problem or success(outcome)}")

    def _leave(self, run: _Run) -> None:
        for each in run.processes:
            each.place.give_back()
        shutil.rmtree(run.table.folder, ignore_errors=True)
        run.exits.close()

    # What starts

    def _start(self) -> None:
        while (chosen := self._next()) is not None:
            place = self.places.take()
            if place is None:
                return
            if isinstance(chosen, _Run):
                self._start_process(chosen, place)
            else:
                self._prepare(place)

    def _next(self) -> _Run | bool | None:
        """The cell that gets one more process; ``True``: one that waits; ``None``: none needs one."""
        # The newest cell was added first, so it is the first that runs.
        if self._runs and self._runs[0].owes_first_answer():
            return self._runs[0]
        if self._waiting:
            return True
        run = max(self._runs, key=_Run.open_seconds, default=None)
        return run if run is not None and run.open_seconds() / (len(run.processes) + 1) >= _WORTH else None

    def _prepare(self, place: Place) -> None:
        cell, make = self._waiting.pop(0)
        exits = contextlib.ExitStack()
        try:
            with explained_os_errors():
                exits.enter_context(alone(cell, self.sweep, self.say))
                job = make(cell, [other for other, _ in self._waiting])
                outcome = job.prepare(exits)
                if outcome is None:
                    run = self._begin(job, exits)
                    self._start_process(run, place)
                    return
        except MatrixError as error:
            # It is among them already where starting its process failed.
            self._runs = [run for run in self._runs if run.cell_id != cell.id]
            self._end(cell.id, error)
        except BaseException:
            # Only where nothing was started: a run holds both until _leave, and has returned above.
            exits.close()
            place.give_back()
            raise
        else:
            self._end(cell.id, outcome)
        exits.close()
        place.give_back()

    def _begin(self, job: CellJob, exits: contextlib.ExitStack) -> _Run:
        job.begin()
        is_newest = job.cell.id == self.newest
        table = GroupTable(self.folder / job.cell.id)
        shutil.rmtree(table.folder, ignore_errors=True)  # of a command that was killed
        # Before the first process starts, which reads it when it has collected its tests.
        table.plan(known_seconds(self.sweep.layout, job.cell.id), first_answer=is_newest)
        run = _Run(job, table, exits, first_answer=FirstAnswer(job.cell.id, self.say) if is_newest else None)
        self._runs.append(run)
        return run

    def _start_process(self, run: _Run, place: Place) -> None:
        path = run.table.folder / f"output-{len(run.outputs)}.txt"
        run.outputs.append(path)
        command = run.job.command("-p", _PLUGIN, "--trlcompat-claims", str(run.table.folder))
        # A process that is not among ours yet could not be stopped.
        with process.deferred_signals(), open(path, "wb") as output:
            running = process.start(command, env=run.job.variables, cwd=self.sweep.layout.root, output=output)
            run.processes.append(_Process(running, place, path))

    # What is shown

    def _read_verdicts(self, run: _Run) -> None:
        answer = run.first_answer
        if answer is None or answer.is_complete:
            return
        with contextlib.suppress(OSError, RecordError):
            size = run.job.results.stat().st_size
            if size != run.read:
                run.read = size
                # Whatever is wrong with the file is reported when the cell ends.
                answer.take(read_records(run.job.results))
        groups = run.table.groups
        if groups is not None:
            done = run.table.seconds(groups)
            if all(group.name in done for group in groups if group.is_first_answer):
                answer.complete()

    def _show(self) -> None:
        for run in self._runs:
            self._read_verdicts(run)
        if self.now() - self._said >= _BETWEEN_LINES:
            self._said = self.now()
            self.say(self._progress.so_far({run.cell_id: run.share() for run in self._runs}, self.now()))


def _status(run: _Run, is_missing: bool) -> int:
    """One exit status for all processes; that of a killed one, whose tests another has run, does not count."""
    killed = [status for status in run.statuses if status < 0]
    if killed and (is_missing or len(killed) == len(run.statuses)):
        return killed[-1]
    return max(status for status in run.statuses if status >= 0)


def _shortfall(run: _Run, missing: Sequence[str]) -> str | None:
    if run.table.groups is None:
        return "pytest ended without saying what it would run; see its output"
    if missing:
        return f"{len(missing)} of {len(run.groups)} groups of launches were not run: {', '.join(missing[:3])}"
    return None


def _tail(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")[-_OUTPUT:]
    return ""


def known_seconds(layout: Layout, cell_id: str) -> dict[str, float]:
    """What the groups of a cell took when it last ran here; none where it has not."""
    try:
        raw = json.loads(_seconds_file(layout, cell_id).read_text(encoding="utf-8"))
        return {str(name): float(seconds) for name, seconds in raw.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}  # only the order depends on it


def measured_costs(layout: Layout, costs: Mapping[str, float]) -> dict[str, float]:
    """What cells cost, by what they took here where they have run, which another machine's numbers are not.

    Args:
        costs: what is published.
    """
    folder = _seconds_file(layout, "").parent
    here = {path.stem: sum(known_seconds(layout, path.stem).values()) for path in folder.glob("*.json")}
    both = [name for name in here if costs.get(name)]
    rate = sum(here[name] for name in both) / sum(costs[name] for name in both) if both else 1.0
    return {**{name: seconds * rate for name, seconds in costs.items()}, **here}


def keep_group_seconds(layout: Layout, cell_id: str, seconds: Mapping[str, float]) -> None:
    """For the next run; those of groups that did not run are kept."""
    if seconds:
        merged = {**known_seconds(layout, cell_id), **seconds}
        write_whole(_seconds_file(layout, cell_id), json.dumps(dict(sorted(merged.items())), indent=0) + "\n")


def _seconds_file(layout: Layout, cell_id: str) -> Path:
    return layout.results / ".seconds" / f"{cell_id}.json"
