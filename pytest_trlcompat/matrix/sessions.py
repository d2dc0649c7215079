"""What the sessions of the noxfile do, so that the noxfile only declares them. Runs in the interpreter of nox."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path

from pytest_trlcompat._escaping import printable
from pytest_trlcompat._secrets import redacted
from pytest_trlcompat.matrix import disk, downstream, locks, own_coverage, shards, torch_axis
from pytest_trlcompat.matrix import tools as tool_locks
from pytest_trlcompat.matrix.arguments import (
    FULL,
    PAIRWISE,
    PYTHON,
    TABLES,
    Arguments,
    parse_arguments,
    requested_added,
    requested_pairwise,
)
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.engines import local_session, places
from pytest_trlcompat.matrix.engines import options as engine_options
from pytest_trlcompat.matrix.engines import session as ray_session
from pytest_trlcompat.matrix.engines.local_session import after
from pytest_trlcompat.matrix.environments import Environment, prune
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.job import CellJob, run_cell
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.lock_renewal import LockRenewal
from pytest_trlcompat.matrix.parsing import parse_pins, read_matrix
from pytest_trlcompat.matrix.results import Outcome, success
from pytest_trlcompat.matrix.suite_choice import chosen_tests
from pytest_trlcompat.matrix.sweep import Sweep
from pytest_trlcompat.matrix.tool_environments import Environments, variables_of
from pytest_trlcompat.matrix.uv import WHEELS_ONLY, uv_cached_first

__all__ = ["Project"]


def _say(text: str) -> None:
    """Flushed, so that a line appears before the output of the child process that it announces."""
    print(printable(redacted(text)), flush=True)


class Project:
    """This project's checkout with its matrix, and the nox command that is running."""

    def __init__(self, root: Path, say: Callable[[str], None] = _say) -> None:
        self.layout = Layout(root)
        self.matrix: Matrix = read_matrix(self.layout.matrix)
        self.sweep = Sweep(self.layout)
        self.say = say
        self._named: list[str] = []
        self._due: tuple[str, ...] = ()
        self._tables = False
        self.local = local_session.LocalSession(self.layout, self.sweep, self.say)
        self.environments = Environments(self.matrix, self.layout, self.say)
        self.ray = ray_session.RaySession(self.layout, self.sweep, self.environments.tools, variables_of)
        if self.sweep.outermost:
            # nox has no hook for the end of all sessions that also works after a failure or Ctrl-C, and under
            # --parallel, where sessions run in other processes. The exit of the outermost nox is that end.
            atexit.register(self.end)

    # Sessions

    def cells(self, command: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[str]:
        """The ids of the cells that have sessions in a nox command: not all, so that ``nox -l`` stays short.

        With ``-- --engine ray`` one session has all chosen cells.

        They are the full selection with ``-- --full``, those of covering arrays with ``-- --pairwise``, else the
        default cells; with another torch after ``-- --torch dated`` or ``-- --torch 2.6.0``; and the cells that the
        command names.

        Args:
            command: the arguments of nox.
        """
        cut = list(command).index("--") if "--" in command else len(command)
        # nox takes names of sessions from NOXSESSION, too.
        posargs, names = command[cut:], [*command[:cut], environ.get("NOXSESSION", "")]
        places.share_limit(command, outermost=self.sweep.outermost)
        self._tables = TABLES in posargs
        torch = torch_axis.requested_torch(posargs)
        pairwise = requested_pairwise(posargs)
        chosen = self._selection(
            FULL in posargs, pairwise, torch, shards.requested_shard(posargs), requested_added(posargs)
        )
        known = {cell.id for cell in (*chosen, *self.matrix.cells)}
        named = re.findall(r"matrix\(([^()]+)\)", " ".join(names))
        self._named = [cell_id for cell_id in named if self._has(cell_id, known)]
        self._due = local_session.due_cells(names, [cell.id for cell in chosen], self._named)
        sessions = [ray_session.WHOLE] if engine_options.requested_ray(posargs) else [cell.id for cell in chosen]
        return list(dict.fromkeys([*sessions, *self._named]))

    def _selection(
        self, full: bool, pairwise: int, torch: str | None, shard: tuple[int, int] | None, added: str
    ) -> tuple[Cell, ...]:
        cells = torch_axis.selection(self.matrix, self.layout, full=full, pairwise=pairwise, torch=torch, added=added)
        return cells if shard is None else shards.shard_of(cells, shards.costs(self.layout), shard)

    def _has(self, cell_id: str, known: Container[str]) -> bool:
        if cell_id not in known:
            with contextlib.suppress(MatrixError):
                torch_axis.find(self.matrix, self.layout, cell_id)
                return True
        return cell_id in known

    def matrix_cell(self, cell_id: str, arguments: Sequence[str]) -> None:
        """Sweep one cell of the matrix.

        Raises:
            MatrixError: when a verdict is not as predicted, or the cell did not finish.
        """
        options = parse_arguments("matrix", arguments)
        if options.positional or options.date or options.python:
            refused = " ".join(options.positional) or ("--date" if options.date else PYTHON)
            raise MatrixError(f"matrix does not take {refused}; for other cells use: nox -s cell")
        if options.ray is not None:
            self._on_ray(cell_id, options)
            return
        cell = self._with_torch(cell_id, options)
        cells = self._selection(options.full, options.pairwise, options.torch, options.shard, options.added)
        if options.shard is not None:
            shards.keep_part(self.layout, cells, options.shard)
        later = after(cell, cells)
        if not self.sweep.has_begun:
            # nox does not give a session the names of the others; with --parallel only its own is known.
            named = [
                torch_axis.find(self.matrix, self.layout, cell_id) for cell_id in self._named if self.sweep.outermost
            ]
            self._announce(named or [cell, *later])
        if options.pytest_arguments:
            # They may choose among the tests, or end pytest early: one process, whose output is shown as it comes.
            self._run(cell, self._with_tests(cell, options), later)
        else:
            self._run_beside(cell, options, cells)

    def _with_tests(self, cell: Cell, options: Arguments) -> Arguments:
        tests = ("-m", self._chosen_tests(cell, options)) if not options.issues else ()
        return dataclasses.replace(options, pytest_arguments=(*tests, *options.pytest_arguments))

    def _run_beside(self, cell: Cell, options: Arguments, chosen: Sequence[Cell]) -> None:
        """Run a cell, and meanwhile those of the sessions that follow.

        Args:
            chosen: all cells that ``-s matrix`` means. Under ``--parallel`` other processes run them.
        """
        ids = {other.id for other in chosen}
        due_ids = [cell_id for cell_id in self._due if cell_id in ids or cell_id in self._named]
        due = [self._with_torch(cell_id, options) for cell_id in due_ids]

        def make(other: Cell, later: Sequence[Cell]) -> CellJob:
            self._mention_age(other, options)
            arguments, issues = self._with_tests(other, options).pytest_arguments, tuple(sorted(options.issues))
            following = (*later, *(each for each in after(other, chosen) if each not in later))
            return CellJob(self.matrix, other, self.sweep, issues, options.fresh, arguments, following, self.say)

        self._judge(self.local.run(cell, due, make))

    def _chosen_tests(self, cell: Cell, options: Arguments) -> str:
        return chosen_tests(cell, self.matrix.default(), full=options.full)

    def _with_torch(self, cell_id: str, options: Arguments) -> Cell:
        cell = torch_axis.find(self.matrix, self.layout, cell_id)
        return cell if options.torch is None else torch_axis.with_torch(self.matrix, self.layout, cell, options.torch)

    def _on_ray(self, session: str, options: Arguments) -> None:
        """The session of all chosen cells, or of one that the command names; the first one runs all of them."""
        if not self.ray.has_run:
            named = [self._with_torch(cell_id, options) for cell_id in self._named]
            chosen = self._selection(options.full, options.pairwise, options.torch, options.shard, options.added)
            tests = {} if options.issues else {cell.id: self._chosen_tests(cell, options) for cell in named or chosen}
            self.ray.run(named or chosen, options, self.environments.metadata(), tests)
        self.ray.check(session)

    def free_cell(self, arguments: Sequence[str]) -> None:
        """Run any other combination: pins (``trl=0.19.1``), or the id of a cell of the matrix.

        Raises:
            MatrixError: see :meth:`matrix_cell`.
        """
        options = parse_arguments("cell", arguments)
        if options.full or options.pairwise or options.shard or options.added:
            chosen = {FULL: options.full, PAIRWISE: options.pairwise, f"--{options.added}": options.added}
            which = next((name for name, value in chosen.items() if value), shards.SHARD)
            raise MatrixError(f"cell does not take {which}; for all cells use: nox -s matrix -- {which}")
        if len(options.positional) == 1 and "=" not in options.positional[0]:
            cell = torch_axis.find(self.matrix, self.layout, options.positional[0])
            cell = dataclasses.replace(cell, date=options.date or cell.date)
        else:
            cell = Cell(parse_pins(options.positional), options.date)
        if options.python is not None:
            cell = self.matrix.on_python(cell, options.python)
        if options.torch is not None:
            if options.torch == torch_axis.DATED and locks.kept_date(cell, self.layout) is None:
                cell = dataclasses.replace(cell, date=cell.date or locks.find_date(self.matrix, cell))
            cell = torch_axis.with_torch(self.matrix, self.layout, cell, options.torch)
        if options.ray is not None:
            self.ray.run([cell], options, self.environments.metadata())
            self.ray.check(cell.id)
            return
        self._announce([cell])
        self._run(cell, options)

    def renew_locks(self, arguments: Sequence[str], known_tools: Sequence[tool_locks.Tool] = ()) -> None:
        """Renew locks; see :meth:`pytest_trlcompat.matrix.lock_renewal.LockRenewal.renew`."""
        LockRenewal(self.matrix, self.layout, self.say).renew(arguments, known_tools)

    def clean(self) -> None:
        """Remove the environments that belong to no lock: of the repository, of a sweep, of a bisection, or of a tool.

        What is in use stays, so that sweeps and bisections may run meanwhile.

        Raises:
            MatrixError: when a lock cannot be read, or an environment cannot be removed.
        """
        layout = self.layout
        folders = (layout.locks, layout.resolved, layout.downstream / "locks")
        paths = [path for folder in folders for path in folder.glob("*.txt")]
        paths += layout.bisections.glob("*/locks/*.txt")
        prune(layout, [*(locks.read_lock(path) for path in paths), *tool_locks.known(layout)], self.say)

    def report(self, arguments: Sequence[str] = ()) -> None:
        """Merge the results of sweeps into the report's files, and print its summary, with ``--tables`` its tables.

        With ``--publish`` among the arguments, also write the evidence and the pages that belong to the repository;
        with ``--pages`` nothing but the pages, from the evidence in the repository.

        Raises:
            MatrixError: when there are no results, or the files cannot be written.
        """
        tools = self.environments.tools(*self.environments.report_tool())
        rest = [word for word in arguments if word not in ("--publish", "--pages")]
        publish = [part for word in arguments if word not in rest for part in (word, str(self.layout.root))]
        history = ["--history", str(self.layout.root)]
        program = [str(tools.python), "-m", "pytest_trlcompat.matrix"]
        command = [*program, str(self.layout.results), *history, *rest, *publish]
        # The report is printed by a child process; what was printed here must come first.
        sys.stdout.flush()
        done = subprocess.run(command, cwd=self.layout.root, env=variables_of(tools), check=False)
        if done.returncode != 0:
            raise MatrixError("the report could not be made, for the reason printed above")

    def test_downstream(self, arguments: Sequence[str]) -> None:
        """Test real projects with this one installed; see :func:`pytest_trlcompat.matrix.downstream.session`."""
        downstream.session(self.matrix, self.layout, arguments, self.say, self.environments.run_in)

    def measure_coverage(
        self,
        runs: Iterable[tuple[Environment, Sequence[str]]],
        coverage: Sequence[str],
        pytest_arguments: Sequence[str],
    ) -> None:
        """Run this project's tests with coverage, and print the totals of its packages.

        Args:
            runs: environments, and the arguments of pytest in each.
            coverage: requirements, which are added to these environments, and taken out of cells afterwards: the
                sweep uses the same environments, which hold what their locks name.
            pytest_arguments: for every run.

        Raises:
            MatrixError: when tests fail, after the totals were printed.
        """
        folder = self.layout.root / own_coverage.JSON.parent
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        failed = []
        with contextlib.ExitStack() as afterwards:
            for environment, arguments in runs:
                python = ["--quiet", "--python", str(environment.python)]
                if not own_coverage.is_installed(environment.root):
                    afterwards.callback(uv_cached_first, ["pip", "uninstall", *python, "coverage"])
                uv_cached_first(["pip", "install", *WHEELS_ONLY, *python, *coverage])
                try:
                    self.environments.run_in(environment, own_coverage.run_command([*arguments, *pytest_arguments]))
                except MatrixError as error:
                    failed.append(str(error))
            self.environments.run_all_in(environment, own_coverage.reporting_commands())
        self.say(own_coverage.format_totals(self.layout.root))
        if failed:
            raise MatrixError("; ".join(failed))

    # The end

    def end(self) -> None:
        """After all sessions: print the summary of the cells that this command ran, or their tables."""
        self.local.end()
        if not self.sweep.has_begun:
            return
        try:
            self.sweep.close()
            self.report(["--sweep", self.sweep.name, *([TABLES] if self._tables else [])])
        except (MatrixError, OSError) as error:
            print(printable(redacted(f"no summary: {error}")), file=sys.stderr)

    def _announce(self, cells: Sequence[Cell]) -> None:
        if text := disk.announcement(self.matrix, cells, self.layout):
            self.say(text)

    def _mention_age(self, cell: Cell, options: Arguments) -> None:
        if options.torch == torch_axis.DATED and torch_axis.older_than_supported(self.matrix, cell):
            self.say(f"{cell.id}: gets the oldest supported torch, although it is newer than {cell.date}")

    def _run(self, cell: Cell, options: Arguments, following: Sequence[Cell] = ()) -> None:
        self._mention_age(cell, options)
        outcome = run_cell(
            self.matrix,
            cell,
            self.sweep,
            issues=options.issues,
            fresh=options.fresh,
            pytest_arguments=options.pytest_arguments,
            following=following,
            say=self.say,
        )
        self._judge(outcome)

    def _judge(self, outcome: Outcome) -> None:
        if outcome.problem is not None:
            raise MatrixError(outcome.problem)
        self.say(success(outcome))
