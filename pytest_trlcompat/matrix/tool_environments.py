"""The environments that sessions work in: of cells, and of the tools that they use; and programs that run in them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from pytest_trlcompat.matrix import locks, process, torch_axis
from pytest_trlcompat.matrix import tools as tool_locks
from pytest_trlcompat.matrix.cells import Matrix
from pytest_trlcompat.matrix.engines import options as engine_options
from pytest_trlcompat.matrix.engines import session as ray_session
from pytest_trlcompat.matrix.environments import Environment, ensure, ensure_tools, install_hashed
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.suite_run import inherited_variables

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Environments", "variables_of"]

_BUILDS_PROJECT = ("hatchling", "editables")
"""What installs this project as editable."""


class Environments:
    """The environments of this project's checkout."""

    def __init__(self, matrix: Matrix, layout: Layout, say: Callable[[str], None]) -> None:
        self.matrix, self.layout, self.say = matrix, layout, say

    def stack(self, cell_id: str) -> Environment:
        """The environment of a cell of the matrix, with this project installed."""
        cell = torch_axis.find(self.matrix, self.layout, cell_id)
        lock = locks.lock_for(self.matrix, cell, self.layout)
        return ensure(lock, self.layout, self.say)

    def tools(
        self, name: str, requirements: Sequence[str], *, project: bool = False, python: str | None = None
    ) -> Environment:
        """An environment with tools, as their lock says; with ``project``, also this project and its dependencies.

        Args:
            python: the version of the interpreter (``3.12``); ``None``: that of the running one.
        """
        tool = self.tool(name, requirements, project=project, python=python)
        return ensure_tools(tool_locks.lock_for(tool, self.matrix, self.layout), self.layout, self.say, project=project)

    def tool(
        self, name: str, requirements: Sequence[str], *, project: bool = False, python: str | None = None
    ) -> tool_locks.Tool:
        """What :meth:`tools` makes an environment of."""
        ours = [*self.metadata()["dependencies"], *_BUILDS_PROJECT] if project else []
        running = f"{sys.version_info.major}.{sys.version_info.minor}"
        return tool_locks.Tool(name, (*requirements, *ours), python or running)

    def locked(self, tool: tool_locks.Tool, packages: Collection[str]) -> list[str]:
        """Packages of a tool's lock, as ``coverage==7.13.0``."""
        lock = tool_locks.lock_for(tool, self.matrix, self.layout)
        return [f"{name}=={lock.packages[name]}" for name in packages]

    def bisect_tools(self, requirements: Sequence[str], words: Sequence[str]) -> Environment:
        """The environment of bisect, with Ray if the command line asks for that engine."""
        ray = engine_options.of_words(words)
        if ray is None:
            return self.tools("bisect", requirements, project=True)
        with_ray = [*requirements, *ray_session.ray_requirements(self.extra("ray"), ray.version)]
        return self.tools("bisect-ray", with_ray, project=True, python=ray.python)

    def extra(self, name: str) -> list[str]:
        """The requirements of an extra of this project."""
        return list(self.metadata()["optional-dependencies"][name])

    def locked_releases(self, packages: Collection[str]) -> list[str]:
        """Every release of these packages in the kept locks, as ``trl==1.17.0``."""
        locked = [locks.read_lock(path).packages for path in self.layout.locks.glob("*.txt")]
        return sorted({f"{name}=={lock[name]}" for lock in locked for name in packages if name in lock})

    def unpack(self, release: str, environment: Environment, folder: str) -> Path:
        """Install one release, ``trl==1.17.0``, without its dependencies into its own folder below ``folder``.

        Args:
            environment: contains build requirements, such as torch for DeepSpeed.
        """
        target = Path(folder, release)
        options = ["--no-build-isolation", "--upgrade", "--target", str(target)]
        install_hashed([release], self.matrix.python, str(environment.python), self.layout, *options)
        return target

    def report_tool(self) -> tuple[str, list[str]]:
        """Name and requirements of the environment that makes reports."""
        needed = [
            requirement
            for requirement in self.metadata()["dependencies"]
            if requirement.startswith(("packaging", "tomli"))
        ]
        return "report", [*needed, *self.extra("report")]

    def metadata(self) -> dict[str, Any]:
        """What pyproject.toml says of this project."""
        with open(self.layout.root / "pyproject.toml", "rb") as file:
            return dict(tomllib.load(file)["project"])

    def run_in(self, environment: Environment, command: Sequence[str]) -> None:
        """Run a program of an environment in the checkout. It leaves no process behind.

        Raises:
            MatrixError: when it fails.
        """
        self.run_all_in(environment, [command])

    def run_all_in(self, environment: Environment, commands: Sequence[Sequence[str]]) -> None:
        """Run all of several programs, even if one fails.

        Raises:
            MatrixError: names the ones that failed.
        """
        failed = []
        for command in commands:
            program = [str(environment.root / "bin" / command[0]), *command[1:]]
            with environment.used():
                status = process.run(program, env=variables_of(environment), cwd=self.layout.root)
            if status != 0:
                failed.append(f"{' '.join(command)} ended with exit status {status}")
        # What these programs import was compiled by them alone; environments that are built later take it over.
        environment.share_modules()
        if failed:
            raise MatrixError("; ".join(failed))


def variables_of(environment: Environment) -> dict[str, str]:
    """The variables of a program that runs in an environment."""
    return {**inherited_variables(), **environment.variables}
