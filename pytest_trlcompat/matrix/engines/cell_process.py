"""Runs one cell on a node: ``python -m pytest_trlcompat.matrix.engines.cell_process CACHE``, in the folder of the run.

A process of its own, without Ray, since a cell handles signals and processes as it does under nox. What it reads and
writes lies in the folder of the run.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

from pytest_trlcompat.matrix.cells import Cell
from pytest_trlcompat.matrix.engines.messages import CellTask
from pytest_trlcompat.matrix.engines.node import PROJECT, NodeLayout
from pytest_trlcompat.matrix.environments import existing
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.files import in_use, write_whole
from pytest_trlcompat.matrix.job import run_cell
from pytest_trlcompat.matrix.locks import Lock, lock_for, read_lock
from pytest_trlcompat.matrix.parsing import parse_day, read_matrix
from pytest_trlcompat.matrix.process import signals_as_ctrl_c
from pytest_trlcompat.matrix.results import Outcome
from pytest_trlcompat.matrix.sweep import Sweep

__all__ = ["END", "LINES", "TASK", "main"]

TASK, LINES, END = "task.json", "lines.txt", "end.json"
"""Files of the run: what is asked, messages for people, and how it ended."""


class NodeSweep(Sweep):
    """The part of a sweep that runs on a node; environments that were not used for longest are removed first."""

    def __init__(self, layout: NodeLayout, name: str) -> None:
        super().__init__(layout, {Sweep.VARIABLE: name})
        self._locks = layout.used_locks

    def finished(self, python: str) -> list[Lock]:
        built_locks = []
        # A lock's file is written again after each run, so its time is that of the last use.
        for path in sorted(self._locks.glob("*.txt"), key=lambda path: path.stat().st_mtime):
            with contextlib.suppress(MatrixError):  # written by another release of this project
                lock = read_lock(path)
                # It was removed meanwhile, to free disk space.
                if existing(lock, self.layout) is None:
                    path.unlink(missing_ok=True)
                else:
                    built_locks.append(lock)
        return built_locks


def main(arguments: list[str] | None = None) -> int:
    """Run the cell; returns the exit status."""
    (cache,) = sys.argv[1:] if arguments is None else arguments
    run = Path.cwd()
    task = CellTask.from_json((run / TASK).read_text(encoding="utf-8"))
    layout = NodeLayout(PROJECT, Path(cache), run)
    end: dict[str, object] = {}
    # The mark tells others that the folder is in use, also where the process that started this one was killed.
    with in_use(run.with_suffix(".used")), open(run / LINES, "a", encoding="utf-8", buffering=1) as lines:
        try:
            with signals_as_ctrl_c():
                outcome = _run(task, layout, lambda text: print(text, file=lines))
            end = {"out_of_space": outcome.out_of_space}
        except MatrixError as error:
            end = {"error": str(error)}
        except KeyboardInterrupt:
            return 130
        finally:
            write_whole(run / END, json.dumps(end))
    return 0


def _run(task: CellTask, layout: NodeLayout, say: Callable[[str], None]) -> Outcome:
    matrix = read_matrix(layout.matrix)
    cell = Cell(task.pins, parse_day(task.date) if task.date else None, python=task.python)
    if task.lock is not None:
        write_whole(layout.resolved / f"{cell.id}.txt", task.lock)
    if task.state is not None:
        write_whole(layout.results / f"{cell.id}.jsonl", task.verdicts)
        write_whole(layout.results / f"{cell.id}.cell.json", task.state)
    outcome = run_cell(
        matrix,
        cell,
        NodeSweep(layout, task.sweep),
        issues=task.issues,
        pytest_arguments=task.pytest_arguments,
        say=say,
    )
    if outcome.sidecar.lock:
        lock = lock_for(matrix, cell, layout)
        write_whole(layout.used_locks / f"{lock.digest}.txt", lock.to_text())
    return outcome


if __name__ == "__main__":
    sys.exit(main())
