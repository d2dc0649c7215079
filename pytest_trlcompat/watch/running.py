"""Runs the cells of a watch, one after the other, each once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_trlcompat._provenance import Provenance, difference
from pytest_trlcompat.matrix import locks
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.environments import drop_unused, existing, remove
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.job import run_cell
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.matrix.results import TESTED, UNTESTABLE, Sidecar, read_sidecar
from pytest_trlcompat.matrix.suite_choice import chosen_tests
from pytest_trlcompat.matrix.suite_run import code_digest
from pytest_trlcompat.matrix.sweep import Sweep
from pytest_trlcompat.watch.budget import Budget
from pytest_trlcompat.watch.layout import WatchLayout
from pytest_trlcompat.watch.plan import WatchedCell

__all__ = ["Runner", "Scope", "sidecar_of", "why_not_current"]

Say = Callable[[str], None]


@dataclass(frozen=True)
class Scope:
    """What is run of each cell.

    Attributes:
        issues: whose suites; empty: all.
        conformance: with the conformance suites, which hold the trainers against the reference.
        every_pair: with their rows for every pair of settings.
    """

    issues: tuple[str, ...] = ()
    conformance: bool = True
    every_pair: bool = False

    @property
    def name(self) -> str:
        """Of the folder of results: what was measured by another scope is no answer to this one."""
        words = [
            "compat",
            *(["every-pair"] if self.every_pair else []),
            *([] if self.conformance else ["suites-alone"]),
        ]
        return "-".join([*words, *self.issues])

    def pytest_arguments(self, suites: Path) -> list[str]:
        # A new cell is none of the default ones, and tries all rows.
        choice = [] if self.issues else ["-m", chosen_tests(Cell({}), (), full=self.every_pair)]
        return [*choice, *([] if self.conformance else [f"--ignore={suites / 'conformance'}"])]


def why_not_current(sidecar: Sidecar, code: str) -> str:
    """Why a cell that was measured must be measured again, as it follows "it was measured"; empty where it need not.

    Its packages are those of its lock: its environment was compared with that, and its verdicts with the environment.

    Args:
        code: of :func:`pytest_trlcompat.matrix.suite_run.code_digest`, as it is now.
    """
    recorded = Provenance.parse(sidecar.provenance)
    return difference(recorded, Provenance(code, recorded.packages))


def sidecar_of(cell: Cell, layout: WatchLayout) -> Sidecar | None:
    """How a cell's run ended; ``None`` if it has not begun, or its file is damaged."""
    path = layout.results / f"{cell.id}.cell.json"
    try:
        return read_sidecar(path) if path.is_file() else None
    except MatrixError:
        return None


@dataclass
class Runner:
    """Runs cells, and removes the environments that it built for them."""

    matrix: Matrix
    layout: WatchLayout
    scope: Scope
    budget: Budget
    say: Say

    def __post_init__(self) -> None:
        self._code = code_digest(self.layout)
        # Those that stand before the first cell is run are another command's, and stay.
        self._stood = {path.name for path in self.layout.environments.glob("cell-*")}

    def run(self, cells: Sequence[WatchedCell], tested: Callable[[WatchedCell, Lock], None]) -> list[WatchedCell]:
        """Run those without verdicts of this code and their lock; returns the ones for which there was no space left.

        Args:
            tested: called after a cell's suites, while its environment stands.

        Raises:
            KeyboardInterrupt: when stopped, or out of time; the same call goes on after the last verdict.
            MatrixError: for an error of the operating system.
        """
        sweep = Sweep(self.layout, {})
        left: list[WatchedCell] = []
        try:
            for watched in cells:
                if self.is_done(watched):
                    continue
                if self.budget.is_full:
                    self.remove_environments()
                if self.budget.is_full:
                    left.append(watched)
                    continue
                self.say(f"{watched.cell.id}: {watched.about}")
                outcome = run_cell(
                    self.matrix,
                    watched.cell,
                    sweep,
                    issues=self.scope.issues,
                    pytest_arguments=self.scope.pytest_arguments(self.layout.suites),
                    say=self.say,
                )
                if outcome.sidecar.state not in (TESTED, UNTESTABLE):
                    left.append(watched)
                elif outcome.sidecar.state == TESTED:
                    tested(watched, locks.lock_for(self.matrix, watched.cell, self.layout))
        finally:
            sweep.close()
        return left

    def is_done(self, watched: WatchedCell) -> bool:
        """Whether it has verdicts of this code and its lock. What could not be built is tried again."""
        sidecar = sidecar_of(watched.cell, self.layout)
        if sidecar is None or sidecar.state != TESTED:
            return False
        if why := why_not_current(sidecar, self._code):
            self.say(f"{watched.cell.id}: was measured {why}; it is measured again")
            return False
        lock = locks.known(self.matrix, watched.cell, self.layout)
        if lock is not None and dict(lock.packages) != dict(sidecar.lock):
            self.say(f"{watched.cell.id}: was measured with another lock; it is measured again")
            return False
        return True

    def remove_environments(self) -> None:
        """Remove the environments that were not there before this command, and what they alone used."""
        folders = (self.layout.resolved, *self.layout.bisections.glob("*/locks"))
        for lock in self._locks(path for folder in folders for path in folder.glob("*.txt")):
            environment = existing(lock, self.layout)
            if environment is not None and environment.root.name not in self._stood:
                remove(lock, self.layout, self.say)
        drop_unused(self.layout, self.say)

    def _locks(self, paths: Iterable[Path]) -> list[Lock]:
        readable = []
        for path in paths:
            try:
                readable.append(locks.read_lock(path))
            except MatrixError as error:
                self.say(str(error))
        return readable
