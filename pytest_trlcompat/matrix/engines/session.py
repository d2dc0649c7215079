"""What the sessions of nox do for Ray: start its driver in an environment of its own, and judge what it wrote."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pytest_trlcompat._due import Account
from pytest_trlcompat.matrix import process
from pytest_trlcompat.matrix.arguments import Arguments
from pytest_trlcompat.matrix.cells import Cell
from pytest_trlcompat.matrix.engines import own_cluster
from pytest_trlcompat.matrix.engines.options import of_runner
from pytest_trlcompat.matrix.engines.request import Request
from pytest_trlcompat.matrix.environments import Environment
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.results import Outcome, read_sidecar
from pytest_trlcompat.matrix.sweep import Sweep

__all__ = ["WHOLE", "RaySession", "ray_requirements"]

WHOLE = "ray"
"""The name of the one session of ``matrix`` that runs all chosen cells on Ray."""

_NAMED = 10
"""Cells that a message names; the driver has said of each how it ended."""
_GRACE = 15.0
"""Seconds in which the driver may end the cells that run, after Ctrl-C."""


class RaySession:
    """The cells of one nox command on Ray, all of which its first session runs.

    Args:
        tools: makes an environment from requirements; see :meth:`Project.tools`.
        variables: the environment variables of a program of an environment.
    """

    def __init__(
        self,
        layout: Layout,
        sweep: Sweep,
        tools: Callable[..., Environment],
        variables: Callable[[Environment], Mapping[str, str]],
    ) -> None:
        self._layout, self._sweep, self._tools, self._variables = layout, sweep, tools, variables
        self._problems: dict[str, str] | None = None
        self._cells: tuple[str, ...] = ()

    @property
    def has_run(self) -> bool:
        """Whether an earlier session of this command has run the cells."""
        return self._problems is not None

    def run(
        self,
        cells: Sequence[Cell],
        options: Arguments,
        metadata: Mapping[str, Any],
        tests: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Run cells on Ray.

        Args:
            metadata: ``[project]`` of pyproject.toml.
            tests: by a cell's id, which tests of the suites run in it; see :class:`Request`.

        Raises:
            MatrixError: the driver could not do its work, for a reason that it has printed.
            KeyboardInterrupt: after all that it has started on this machine has ended.
        """
        assert options.ray is not None
        if not self._sweep.outermost:
            raise MatrixError(
                "--engine ray runs as many cells at a time as its nodes have room for; leave out --parallel"
            )
        self._cells = tuple(cell.id for cell in cells)
        self._problems = {cell.id: f"{cell.id} was not run" for cell in cells}
        extra = metadata["optional-dependencies"]["ray"]
        requirements = ray_requirements(extra, options.ray.version)
        environment = self._tools("ray", requirements, project=True, python=options.ray.python)
        request = Request(
            self._layout.root,
            self._sweep.name,
            tuple(cells),
            options.ray,
            options.issues,
            options.fresh,
            options.pytest_arguments,
            of_runner([*metadata["dependencies"], *extra]),
            dict(tests),
        )
        self._drive(request, environment)
        self._problems = {cell.id: text for cell in cells if (text := self._problem(cell)) is not None}

    def check(self, session: str) -> None:
        """Judge a session by what :meth:`run` has left.

        Args:
            session: the id of a cell, or :data:`WHOLE`.

        Raises:
            MatrixError: a verdict is not as predicted, or a cell did not end.
        """
        account = Account("cells", self._cells if session == WHOLE else [session])
        problems = self._problems or {}
        account.meet_all(name for name in self._cells if name not in problems and (session in (WHOLE, name)))
        if not account.due or not set(account.missing) <= problems.keys():
            raise MatrixError(f"nothing was run on Ray for this session: {account.shortfall()}")
        wrong = [problems[name] for name in account.missing]
        if wrong:
            more = [f"and {len(wrong) - _NAMED} more cells"] if len(wrong) > _NAMED else []
            raise MatrixError("\n".join([*wrong[:_NAMED], *more]))

    def _drive(self, request: Request, environment: Environment) -> None:
        with tempfile.TemporaryDirectory(prefix="trlcompat-request-") as folder, environment.used():
            path = Path(folder) / "request.json"
            path.write_text(request.to_json(), encoding="utf-8")
            command = [str(environment.python), "-m", "pytest_trlcompat.matrix.engines", str(path)]
            variables = dict(self._variables(environment))
            variables |= own_cluster.token_variables(request.options, variables)
            status = process.run(command, env=variables, cwd=self._layout.root, grace=_GRACE)
        if status == 0:
            return
        how = "ended, for the reason printed above" if status > 0 else f"was killed by signal {-status}"
        raise MatrixError(
            f"the driver of the sweep on Ray {how}; finished verdicts are kept, and the same command continues after "
            "them"
        )

    def _problem(self, cell: Cell) -> str | None:
        """Why a cell does not count as passed."""
        path = self._layout.results / f"{cell.id}.cell.json"
        try:
            sidecar = read_sidecar(path) if path.exists() else None
            if sidecar is None or sidecar.sweep != self._sweep.name:
                return f"{cell.id} was not run"
            return Outcome.read(sidecar, self._layout.results / f"{cell.id}.jsonl").problem
        except MatrixError as error:
            return str(error)


def ray_requirements(extra: Sequence[str], version: str | None) -> list[str]:
    """The requirements of the driver's environment.

    Args:
        extra: those of the extra ``ray`` in pyproject.toml.
        version: the release of Ray that a cluster has.
    """
    if version is None:
        return list(extra)
    return [f"{line.partition('>')[0]}=={version}" if line.startswith("ray[") else line for line in extra]
