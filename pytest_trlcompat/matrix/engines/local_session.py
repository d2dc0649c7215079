"""What the sessions of nox do for the cells here: the first one starts all of them, and each waits for its own."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Iterable, Sequence

from pytest_trlcompat.matrix import shards
from pytest_trlcompat.matrix.cells import Cell
from pytest_trlcompat.matrix.engines.local import LocalEngine, measured_costs
from pytest_trlcompat.matrix.engines.places import Places
from pytest_trlcompat.matrix.job import CellJob
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.results import Outcome
from pytest_trlcompat.matrix.suite_choice import newest_of
from pytest_trlcompat.matrix.sweep import Sweep

__all__ = ["LocalSession", "after", "due_cells"]

_CHOOSING = ("-k", "--keywords", "-t", "--tags", "-x", "--stop-on-first-error", "--parallel-worker")
"""Options of nox by which not all sessions of a name run, or not to the end."""
_SESSIONS = ("-s", "-e", "--session", "--sessions")


class LocalSession:
    """The cells of one nox command on this machine."""

    def __init__(self, layout: Layout, sweep: Sweep, say: Callable[[str], None]) -> None:
        self._layout, self._sweep, self._say = layout, sweep, say
        self._engine: LocalEngine | None = None
        self._places = layout.results / ".places" / sweep.name

    def run(self, cell: Cell, due: Sequence[Cell], make: Callable[[Cell, Sequence[Cell]], CellJob]) -> Outcome:
        """Run a cell to its end, and meanwhile the others that are due, as far as there is room.

        Args:
            due: the cells that the command runs for certain.
            make: see :meth:`LocalEngine.add`.

        Raises:
            MatrixError, KeyboardInterrupt: see :meth:`LocalEngine.wait`.
        """
        if self._engine is None:
            places = Places.of_command(self._places)
            costs = measured_costs(self._layout, shards.costs(self._layout))
            self._engine = LocalEngine(self._sweep, places, costs, self._say)
        if not self._engine.knows(cell.id):
            cells = due if cell.id in {other.id for other in due} else [cell]
            self._engine.newest = getattr(newest_of(cells), "id", "")
            self._engine.add(cells, make)
        return self._engine.wait(cell.id)

    def end(self) -> None:
        """At the end of the command: end what still runs, where nox has ended before the last of its sessions."""
        if self._engine is not None:
            self._engine.stop()
            self._engine.places.remove()
        shutil.rmtree(self._places, ignore_errors=True)  # under --parallel others had them


def due_cells(words: Sequence[str], chosen: Sequence[str], named: Sequence[str]) -> tuple[str, ...]:
    """The cells that a nox command runs for certain, in whichever order: what may run before its session begins.

    Args:
        words: the arguments of nox before ``--``, and the value of ``NOXSESSION``.
        chosen: the ids of the cells that ``-s matrix`` means.
        named: those that the command names.
    """
    words = [part for word in words for part in re.split(r"[\s,]+", word) if part]
    if any(word.partition("=")[0] in _CHOOSING for word in words):
        return ()
    parted = [word.partition("=") for word in words]
    # Without names nox runs its default sessions, of which matrix is one.
    every = "matrix" in words or any(name in _SESSIONS and value == "matrix" for name, _, value in parted)
    every = every or not any(name in _SESSIONS or "(" in name for name, _, _ in parted)
    return tuple(dict.fromkeys([*(chosen if every else ()), *named]))


def after(cell: Cell, cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """Those that come after it in an order; none where it is no part of that."""
    return tuple(itertools.dropwhile(lambda other: other.id != cell.id, cells))[1:]
