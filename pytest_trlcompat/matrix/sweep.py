"""A sweep: one command, and the cells that it runs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import MutableMapping

from pytest_trlcompat import _processes
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.matrix.parsing import parse_day
from pytest_trlcompat.matrix.results import RUNNING, Sidecar, read_sidecar, read_sidecars

__all__ = ["Sweep"]


def _runs(name: str) -> bool:
    """Whether the other command of a name still runs, by the number of its process at the end."""
    # The system uses numbers of processes again: another command with the number of this process has ended.
    process = name.rpartition("-")[2]
    return process != str(os.getpid()) and process.isdigit() and _processes.is_alive(int(process))


class Sweep:
    """One command: a nox process together with the workers that ``nox --parallel`` starts.

    They share a name, passed on in the environment, and a folder of that name with one empty file for each running
    cell. A command that ends removes its folder, so that the next one starts again. A killed one leaves it, and cells
    that it finished need not run again.
    """

    VARIABLE = "TRLCOMPAT_SWEEP"

    def __init__(self, layout: Layout, environ: MutableMapping[str, str] = os.environ) -> None:
        self.layout = layout
        self.outermost = self.VARIABLE not in environ
        # _runs() reads the number of the process at the end of the name.
        self.name = environ.setdefault(self.VARIABLE, f"{int(time.time())}-{os.getpid()}")
        self._all = layout.results / ".sweeps"

    @property
    def has_begun(self) -> bool:
        """Whether this command has run any cell."""
        return (self._all / self.name).exists()

    def begin_cell(self, cell_id: str) -> None:
        while True:
            (self._all / self.name).mkdir(parents=True, exist_ok=True)
            try:
                (self._all / self.name / cell_id).touch()
            except FileNotFoundError:
                # A command that ended has just removed the folder, since it was empty.
                continue
            return

    def end_cell(self, cell_id: str) -> None:
        """Remove a cell from the running ones of every command."""
        for path in self._all.glob(f"*/{cell_id}"):
            path.unlink(missing_ok=True)

    def was_interrupted(self, name: str) -> bool:
        """Whether the command ``name`` is another one and left its folder."""
        return name != self.name and (self._all / name).exists()

    def still_runs(self, name: str) -> bool:
        """Whether the command ``name`` is another one that has not ended."""
        return name != self.name and _runs(name)

    def sidecars(self) -> list[Sidecar]:
        """The cells that this command ran."""
        return [sidecar for sidecar in read_sidecars(self.layout) if sidecar.sweep == self.name]

    def finished(self, python: str) -> list[Lock]:
        """The locks of the cells that this command has finished, oldest first.

        Args:
            python: the interpreter of cells without one of their own.
        """
        locks = []
        for path in sorted(self.layout.results.glob("*.cell.json"), key=lambda path: path.stat().st_mtime):
            # A damaged sidecar is reported when its cell runs.
            with contextlib.suppress(MatrixError):
                sidecar = read_sidecar(path)
                if sidecar.sweep == self.name and sidecar.state != RUNNING and sidecar.date is not None:
                    locks.append(Lock(sidecar.id, parse_day(sidecar.date), sidecar.python or python, sidecar.lock, ""))
        return locks

    def close(self) -> None:
        """End the command. If a cell is still running, it was interrupted, and its folder stays."""
        # The folder to which a cell refers is how was_interrupted() knows that its sweep was.
        referred = {sidecar.sweep for sidecar in read_sidecars(self.layout)} - {self.name}
        for folder in self._all.glob("*"):
            if folder.name not in referred and (folder.name == self.name or not _runs(folder.name)):
                with contextlib.suppress(OSError):  # not empty
                    folder.rmdir()
