"""Renewing the locks of cells and of tools, the hashes of their releases, and the CUDA libraries of each torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from pytest_trlcompat.matrix import cuda, hashes, locks, torch_axis
from pytest_trlcompat.matrix import tools as tool_locks
from pytest_trlcompat.matrix.cells import PAIRS_TAG, Cell, Matrix
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.files import explained_os_errors, write_whole
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.uv import BUILT_FROM_SOURCE

__all__ = ["MISSING", "TOOLS", "LockRenewal"]

MISSING = "--missing"
"""Option of the session ``lock``: only cells whose lock is missing or out of date."""

TOOLS = "--tools"
"""Option of the session ``lock``: the tools alone, no cells."""


class LockRenewal:
    """What the session ``lock`` does."""

    def __init__(self, matrix: Matrix, layout: Layout, say: Callable[[str], None]) -> None:
        self.matrix, self.layout, self.say = matrix, layout, say

    def renew(self, arguments: Sequence[str], known_tools: Sequence[tool_locks.Tool] = ()) -> None:
        """Resolve cells and write their locks: those named; with ``--missing`` those without a valid lock; or all.

        All are the cells of the matrix and those of ``--torch dated``, the libraries of each torch's CUDA build, and
        ``known_tools``, which ``--tools`` renews alone. Locks of cells that are no longer in the matrix are removed.
        """
        missing = MISSING in arguments
        if TOOLS in arguments:
            if set(arguments) - {TOOLS, MISSING}:
                raise MatrixError(f"{TOOLS} renews the locks of tools alone; leave out the cells, or {TOOLS}")
            with explained_os_errors():
                self._renew_tools(known_tools, missing)
                self._renew_hashes()
                self._write_runner(known_tools)
            return
        cell_ids = [argument for argument in arguments if argument != MISSING]
        named = [torch_axis.find(self.matrix, self.layout, cell_id) for cell_id in cell_ids]
        with explained_os_errors():
            if named:
                self._renew(named, missing)
            else:
                self._renew_tools(known_tools, missing)
                self._renew_cuda_libraries(missing)
                self._renew([cell for cell in self.matrix.cells if PAIRS_TAG not in cell.tags], missing)
                # After the others, since the torch of a dated cell follows from the date of its other lock.
                others = {cell.id for cell in self.matrix.cells}
                self._renew([cell for cell in self._with_kept_locks() if cell.id not in others], missing)
            for path in locks.strays(self._with_kept_locks(), self.layout):
                path.unlink()
                self.say(f"{path.stem}: not a cell of the matrix, its lock is removed")
            for path in cuda.strays(self.matrix, self.layout):
                path.unlink()
                self.say(f"{path.stem}: not a release of torch in the matrix, its CUDA libraries are removed")
            self._renew_hashes()
            self._write_runner(known_tools)

    def _renew_tools(self, known_tools: Sequence[tool_locks.Tool], missing: bool) -> None:
        for tool in known_tools:
            if not missing or tool_locks.kept(tool, self.layout) is None:
                lock = tool_locks.renew(tool, self.matrix, self.layout)
                self.say(f"{tool.id}: {len(lock.packages)} packages as of {lock.date}")
        for path in tool_locks.strays(known_tools, self.layout):
            path.unlink()
            self.say(f"{path.stem}: not a tool of the noxfile, its lock is removed")

    def _write_runner(self, known_tools: Sequence[tool_locks.Tool]) -> None:
        for tool in known_tools:
            if tool.name == tool_locks.RUNNER and (lock := tool_locks.kept(tool, self.layout)) is not None:
                write_whole(self.layout.runner, tool_locks.runner_text(lock, self.layout))

    def _renew(self, cells: Iterable[Cell], missing: bool) -> None:
        for cell in cells:
            if not missing or locks.kept(self.matrix, cell, self.layout) is None:
                lock = locks.renew(self.matrix, cell, self.layout)
                self.say(f"{cell.id}: {len(lock.packages)} packages as of {lock.date}")

    def _renew_cuda_libraries(self, missing: bool) -> None:
        for torch in self.matrix.torch:
            if not missing or not cuda.kept(torch, self.layout):
                libraries = cuda.renew(self.matrix, torch, self.layout)
                self.say(f"torch {torch}: {len(libraries.packages)} CUDA libraries as of {libraries.date}")

    def _renew_hashes(self) -> None:
        releases: dict[str, set[str]] = {self.matrix.python: set()}
        torches = {(torch, self.matrix.python) for torch in self.matrix.torch}
        files = [*self.layout.locks.glob("*.txt"), *self.layout.tool_locks.glob("*.txt")]
        for lock in [locks.read_lock(path) for path in files]:
            releases.setdefault(lock.python, set()).update(lock.releases)
            torches.add((lock.packages.get("torch", ""), lock.python))
        for torch, python in torches:
            if cuda.kept(torch, self.layout):
                releases[python].update(cuda.libraries_of(torch, python, self.layout).requirements)
        for python, added in hashes.renew(releases, self.layout).items():
            if added:
                self.say(f"Python {python}: the hashes of {_count(added, 'new release')}")
        for name in BUILT_FROM_SOURCE:
            built = {line for lines in releases.values() for line in lines if line.startswith(f"{name}==")}
            if built:
                self.say(f"{name}: {_count(built, 'release')} would be built from source; everything else is a wheel")

    def _with_kept_locks(self) -> list[Cell]:
        return torch_axis.cells_with_kept_locks(self.matrix, self.layout)


def _count(things: Collection[str], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"
