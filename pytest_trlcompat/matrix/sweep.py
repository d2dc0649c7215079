"""A sweep: one command of a person, and the cells that it runs. Imports only the standard library."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import MutableMapping

from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.matrix.parsing import parse_day
from pytest_trlcompat.matrix.results import RUNNING, Sidecar, read_sidecar, read_sidecars

__all__ = ["Sweep"]


class Sweep:
    """One command of a person: a nox process together with the workers that ``nox --parallel`` starts.

    They share a name, handed down in the environment, and a folder of that name, which holds one empty file for each
    cell under way. A command that comes to its end takes its folder away, so that the next one starts afresh. One
    that was killed leaves it, and what was finished under it need not run again.
    """

    VARIABLE = "TRLCOMPAT_SWEEP"

    def __init__(self, layout: Layout, environ: MutableMapping[str, str] = os.environ) -> None:
        self.layout = layout
        self.outermost = self.VARIABLE not in environ
        self.name = environ.setdefault(self.VARIABLE, f"{int(time.time())}-{os.getpid()}")
        self._all = layout.results / ".sweeps"

    @property
    def began(self) -> bool:
        """Whether any cell was run under this command."""
        return (self._all / self.name).exists()

    def under_way(self, cell_id: str) -> None:
        (self._all / self.name).mkdir(parents=True, exist_ok=True)
        (self._all / self.name / cell_id).touch()

    def ended(self, cell_id: str) -> None:
        """Strike a cell off, under whichever command it was begun."""
        for path in self._all.glob(f"*/{cell_id}"):
            path.unlink(missing_ok=True)

    def was_cut_short(self, name: str) -> bool:
        """Whether another command left its folder."""
        return name != self.name and (self._all / name).exists()

    def sidecars(self) -> list[Sidecar]:
        """The cells that this command ran."""
        return [sidecar for sidecar in read_sidecars(self.layout) if sidecar.sweep == self.name]

    def finished(self, python: str) -> list[Lock]:
        """The locks of the cells that this command has finished, oldest first.

        Args:
            python: of the cells that name no other.
        """
        found = []
        for path in sorted(self.layout.results.glob("*.cell.json"), key=lambda path: path.stat().st_mtime):
            with contextlib.suppress(MatrixError):  # what is damaged is told when its cell runs
                sidecar = read_sidecar(path)
                if sidecar.sweep == self.name and sidecar.state != RUNNING and sidecar.date is not None:
                    found.append(Lock(sidecar.id, parse_day(sidecar.date), sidecar.python or python, sidecar.lock, ""))
        return found

    def close(self) -> None:
        """End the command, unless a cell is still under way: then it was cut short, and its folder stays."""
        referred = {sidecar.sweep for sidecar in read_sidecars(self.layout)} - {self.name}
        for folder in self._all.glob("*"):
            if folder.name not in referred:
                with contextlib.suppress(OSError):  # not empty
                    folder.rmdir()
