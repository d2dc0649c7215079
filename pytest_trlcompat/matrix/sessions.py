"""What the sessions of the noxfile do, so that the noxfile itself only names them.

Runs in the interpreter of nox. Imports only the standard library, the catalogue and this room.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import datetime
import functools
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.matrix import cuda, disk, locks, process, torch_axis
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.environments import Environment, ensure, ensure_tools, prune
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.files import said_plainly
from pytest_trlcompat.matrix.job import run_cell
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.parsing import parse_day, parse_pins, read_matrix
from pytest_trlcompat.matrix.results import Outcome
from pytest_trlcompat.matrix.sweep import Sweep
from pytest_trlcompat.matrix.uv import uv_network_first

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Workshop"]

_say = functools.partial(print, flush=True)
"""At once, so that a line stands before the output of the child that it announces."""


MISSING = "--missing"
"""Of the session ``lock``: only cells without a lock that was resolved from what the matrix says now."""

FULL = "--full"
"""After ``--``: every cell of the full selection, not the default ones alone."""

TABLES = "--tables"
"""After ``--``: the tables of all issues at the end, not the summary."""

PYTHON = "--python"
"""Of the session ``cell``: the interpreter, as uv understands it."""


@dataclass(frozen=True)
class _Asked:
    """The arguments after ``--`` of the sessions ``matrix`` and ``cell``."""

    words: tuple[str, ...]
    issues: tuple[str, ...]
    date: datetime.date | None
    fresh: bool
    full: bool
    torch: str | None
    python: str | None
    pytest_arguments: tuple[str, ...]


class Workshop:
    """One checkout with its matrix, and the command of nox that is running."""

    def __init__(self, root: Path, say: Callable[[str], None] = _say) -> None:
        self.layout = Layout(root)
        self.matrix: Matrix = read_matrix(self.layout.matrix)
        self.sweep = Sweep(self.layout)
        self.say = say
        self._named: list[str] = []
        self._tables = False
        if self.sweep.outermost:
            # nox has no hook for "all sessions are over" that also works under --parallel, where the sessions run in
            # processes of their own, and after a session failed or Ctrl-C. The end of the outermost nox is that.
            atexit.register(self.end)

    # Sessions

    def cells(self, command: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[str]:
        """The ids of the cells that a command of nox has sessions for, so that ``nox -l`` stays short.

        That is all of the full selection with ``-- --full``, else the default ones and those that it names; with
        ``-- --torch dated`` or ``-- --torch 2.6.0`` with another torch.

        Args:
            command: the arguments of nox.
        """
        cut = list(command).index("--") if "--" in command else len(command)
        asked, words = command[cut:], [*command[:cut], environ.get("NOXSESSION", "")]
        self._tables = TABLES in asked
        chosen = torch_axis.selection(self.matrix, self.layout, full=FULL in asked, torch=torch_axis.asked_in(asked))
        known = {cell.id for cell in (*chosen, *self.matrix.cells)}
        named = re.findall(r"matrix\(([^()]+)\)", " ".join(words))
        self._named = [cell_id for cell_id in named if self._has(cell_id, known)]
        return list(dict.fromkeys([*(cell.id for cell in chosen), *self._named]))

    def _has(self, cell_id: str, known: Container[str]) -> bool:
        if cell_id not in known:
            with contextlib.suppress(MatrixError):
                torch_axis.find(self.matrix, self.layout, cell_id)
                return True
        return cell_id in known

    def matrix_cell(self, cell_id: str, arguments: Sequence[str]) -> None:
        """Sweep one cell of the matrix.

        Raises:
            MatrixError: when a verdict is not as predicted, or the cell was not finished.
        """
        asked = _parse("matrix", arguments)
        if asked.words or asked.date or asked.python:
            refused = " ".join(asked.words) or ("--date" if asked.date else PYTHON)
            raise MatrixError(f"matrix takes no {refused}; for other cells use: nox -s cell")
        cell = torch_axis.find(self.matrix, self.layout, cell_id)
        if asked.torch is not None:
            cell = torch_axis.with_torch(self.matrix, self.layout, cell, asked.torch)
        cells = torch_axis.selection(self.matrix, self.layout, full=asked.full, torch=asked.torch)
        later = tuple(itertools.dropwhile(lambda each: each.id != cell.id, cells))
        if not self.sweep.began:
            # nox tells a session nothing of the others; with --parallel this one knows of itself alone.
            named = [torch_axis.find(self.matrix, self.layout, each) for each in self._named if self.sweep.outermost]
            self._announce(named or later or [cell])
        self._run(cell, asked, later[1:])

    def free_cell(self, arguments: Sequence[str]) -> None:
        """Run any other combination: pins (``trl=0.19.1``), or the id of a cell of the matrix.

        Raises:
            MatrixError: as :meth:`matrix_cell`.
        """
        asked = _parse("cell", arguments)
        if asked.full:
            raise MatrixError(f"cell takes no {FULL}; for all cells use: nox -s matrix -- {FULL}")
        if len(asked.words) == 1 and "=" not in asked.words[0]:
            cell = torch_axis.find(self.matrix, self.layout, asked.words[0])
            cell = dataclasses.replace(cell, date=asked.date or cell.date)
        else:
            cell = Cell(parse_pins(asked.words), asked.date)
        if asked.python is not None:
            cell = self.matrix.on_python(cell, asked.python)
        if asked.torch is not None:
            if asked.torch == torch_axis.DATED and locks.kept_date(cell, self.layout) is None:
                cell = dataclasses.replace(cell, date=cell.date or locks.find_date(self.matrix, cell))
            cell = torch_axis.with_torch(self.matrix, self.layout, cell, asked.torch)
        self._announce([cell])
        self._run(cell, asked)

    def renew_locks(self, arguments: Sequence[str]) -> None:
        """Resolve cells anew and keep their locks: those named, with ``--missing`` those without a valid lock, or all.

        All are the cells of the matrix and those of ``--torch dated``, and what the CUDA build of each torch needs.
        Locks of cells that the matrix no longer has are removed.
        """
        missing = MISSING in arguments
        cell_ids = [argument for argument in arguments if argument != MISSING]
        named = [torch_axis.find(self.matrix, self.layout, cell_id) for cell_id in cell_ids]
        with said_plainly():
            if named:
                self._renew(named, missing)
            else:
                self._renew_cuda_libraries(missing)
                self._renew(self.matrix.cells, missing)
                # The torch of a dated cell follows from the date of the other lock, hence after that.
                others = {cell.id for cell in self.matrix.cells}
                self._renew([cell for cell in self._with_kept_locks() if cell.id not in others], missing)
            for path in locks.strays(self._with_kept_locks(), self.layout):
                path.unlink()
                self.say(f"{path.stem}: no cell of the matrix, its lock is removed")
            for path in cuda.strays(self.matrix, self.layout):
                path.unlink()
                self.say(f"{path.stem}: not among the matrix's releases of torch, its CUDA libraries are removed")

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

    def _with_kept_locks(self) -> list[Cell]:
        return torch_axis.cells_with_kept_locks(self.matrix, self.layout)

    def clean(self) -> None:
        """Remove the environments that neither a kept lock nor one of another combination asks for.

        Raises:
            MatrixError: when a lock cannot be read, or an environment not be removed.
        """
        folders = (self.layout.locks, self.layout.resolved)
        prune(self.layout, [locks.read_lock(path) for folder in folders for path in folder.glob("*.txt")], self.say)

    def report(self, arguments: Sequence[str] = ()) -> None:
        """Merge what sweeps left behind into the report's files, and print its summary, with ``--tables`` its tables.

        With ``--publish`` among the arguments, write the evidence and the pages that are kept in the repository as
        well; with ``--pages`` nothing but the pages, from the evidence that is kept there.

        Raises:
            MatrixError: when there is nothing to report, or its files cannot be written.
        """
        project = self._project()
        needed = [each for each in project["dependencies"] if each.startswith(("packaging", "tomli"))]
        tools = self.tools("report", [*needed, *project["optional-dependencies"]["report"]])
        rest = [word for word in arguments if word not in ("--publish", "--pages")]
        publish = [part for word in arguments if word not in rest for part in (word, str(self.layout.root))]
        command = [str(tools.python), "-m", "pytest_trlcompat.matrix", str(self.layout.results), *rest, *publish]
        sys.stdout.flush()
        done = subprocess.run(command, cwd=self.layout.root, env=_plain(tools), check=False)
        if done.returncode != 0:
            raise MatrixError("the report could not be made; its reason is printed above")

    def run_in(self, environment: Environment, command: Sequence[str]) -> None:
        """Run a program of an environment in the checkout, and leave no process behind.

        Raises:
            MatrixError: when it fails.
        """
        self.run_all_in(environment, [command])

    def run_all_in(self, environment: Environment, commands: Sequence[Sequence[str]]) -> None:
        """Run several, the later ones also after one has failed.

        Raises:
            MatrixError: names those that failed.
        """
        failed = []
        for command in commands:
            program = [str(environment.root / "bin" / command[0]), *command[1:]]
            with environment.used():
                status = process.run(program, env=_plain(environment), cwd=self.layout.root)
            if status != 0:
                failed.append(f"{' '.join(command)} ended with exit status {status}")
        if failed:
            raise MatrixError("; ".join(failed))

    # Environments

    def stack(self, cell_id: str) -> Environment:
        """The environment of a cell of the matrix, this project installed."""
        cell = torch_axis.find(self.matrix, self.layout, cell_id)
        lock = locks.lock_for(self.matrix, cell, self.layout)
        return ensure(lock, self.layout, self.say)

    def tools(
        self, name: str, requirements: Sequence[str], *, project: bool = False, python: str | None = None
    ) -> Environment:
        """A small environment of tools; with ``project``, this project and what it needs installed as well.

        Args:
            python: the interpreter, as uv understands it (``3.12``); ``None``: the running one.
        """
        wanted = [*requirements, *(self._project()["dependencies"] if project else [])]
        return ensure_tools(name, wanted, self.layout, self.say, project=project, python=python)

    def unpack(self, release: str, environment: Environment, folder: str) -> Path:
        """The files of one release, ``trl==1.17.0``, in a folder of its own below ``folder``, without what it requires.

        Args:
            environment: has what some releases are built with, torch for DeepSpeed.
        """
        target = Path(folder, release)
        said = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--python", str(environment.python)]
        uv_network_first([*said, "--target", str(target), "--upgrade", release])
        return target

    # The end

    def end(self) -> None:
        """Print the summary of the cells that this command ran, or their tables, after all sessions are over."""
        if not self.sweep.began:
            return
        try:
            self.sweep.close()
            self.report(["--sweep", self.sweep.name, *([TABLES] if self._tables else [])])
        except (MatrixError, OSError) as error:
            print(f"no summary: {error}", file=sys.stderr)

    def _announce(self, cells: Sequence[Cell]) -> None:
        if told := disk.announcement(self.matrix, cells, self.layout):
            self.say(told)

    def _run(self, cell: Cell, asked: _Asked, following: Sequence[Cell] = ()) -> None:
        if asked.torch == torch_axis.DATED and torch_axis.older_than_supported(self.matrix, cell):
            self.say(f"{cell.id}: gets the oldest torch that is supported; as of {cell.date} that was not there yet")
        outcome = run_cell(
            self.matrix,
            cell,
            self.sweep,
            issues=asked.issues,
            fresh=asked.fresh,
            pytest_arguments=asked.pytest_arguments,
            following=following,
            say=self.say,
        )
        if outcome.problem is not None:
            raise MatrixError(outcome.problem)
        self.say(_good(outcome))

    def _project(self) -> dict[str, Any]:
        with open(self.layout.root / "pyproject.toml", "rb") as file:
            return dict(tomllib.load(file)["project"])


def _good(outcome: Outcome) -> str:
    untested = sum(record.untested for record in outcome.records)
    predicted = sum(record.expected is not None and not record.untested for record in outcome.records)
    return (
        f"{outcome.sidecar.id}: {len(outcome.records)} verdicts in {outcome.sidecar.seconds:.0f} s, "
        f"{predicted} of them predicted, none otherwise"
        + (f"; {untested} could not be tested, by the software accelerator" if untested else "")
    )


def _plain(environment: Environment) -> dict[str, str]:
    inherited: Mapping[str, str] = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "PYTHON", "NOX_")) and name != Sweep.VARIABLE
    }
    return {**inherited, **environment.variables}


_USAGE = {
    "matrix": (
        "nox -s matrix -- [--full] [--torch dated|VERSION] [--issue ID ...] [--fresh] [--tables] [-- PYTEST ARGUMENTS]"
    ),
    "cell": (
        "nox -s cell -- PACKAGE=VERSION ... [--torch dated] [--python 3.12] [--issue ID ...] [--date DAY] [--fresh] "
        "[--tables] [-- PYTEST ARGUMENTS]"
    ),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise MatrixError(f"{message}\n{self.format_usage().strip()}")


def _parse(session: str, arguments: Sequence[str]) -> _Asked:
    """Parse what stands after ``--``; a second ``--`` hands the rest to pytest."""
    cut = list(arguments).index("--") if "--" in arguments else len(arguments)
    ours, pytests = list(arguments[:cut]), tuple(arguments[cut + 1 :])
    parser = _Parser(usage=_USAGE[session], add_help=False, allow_abbrev=False)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--issue", action="append", default=[])
    parser.add_argument("--date")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument(FULL, action="store_true")
    parser.add_argument(TABLES, action="store_true")
    parser.add_argument(torch_axis.OPTION)
    parser.add_argument(PYTHON)
    parsed = parser.parse_intermixed_args(ours)
    for issue in parsed.issue:
        # Here, because a cell that is run for nothing has lost its earlier verdicts.
        try:
            known_issues.load().get_issue(issue)
        except known_issues.CatalogError as error:
            raise MatrixError(f"--issue: {error}") from error
    date = parse_day(parsed.date) if parsed.date else None
    return _Asked(
        tuple(parsed.words), tuple(parsed.issue), date, parsed.fresh, parsed.full, parsed.torch, parsed.python, pytests
    )
