"""A place to run in: an environment, what lies in front of it on the path, and the working folder.

Imports only the standard library and the matrix.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_trlcompat.matrix import process
from pytest_trlcompat.matrix.environments import Environment
from pytest_trlcompat.matrix.suite_run import child_variables

__all__ = ["Hung", "Place"]


class Hung(Exception):
    """The program did not end in time."""


@dataclass(frozen=True)
class Place:
    """Where one candidate is tested.

    Attributes:
        environment: ``None``: the caller's own programs (commits of a repository that is no package of the stack).
        overlay: a folder with a package that hides the environment's own version of it.
        folder: in which programs run.
    """

    environment: Environment | None
    folder: Path
    overlay: Path | None = None

    @property
    def variables(self) -> dict[str, str]:
        if self.environment is None:
            # Under `git bisect run`, git's own variables would lead a child to another repository.
            return {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GIT_"))}
        variables = child_variables(self.environment)
        if self.overlay is not None:
            variables["PYTHONPATH"] = str(self.overlay)
        return variables

    def run(self, command: Sequence[str], log: Path, timeout: float | None) -> int:
        """Run a program to its end, its output into ``log``; returns the exit status.

        Raises:
            Hung: after ``timeout`` seconds; nothing of it is left running.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as output:
            try:
                return process.run(command, env=self.variables, cwd=self.folder, output=output, timeout=timeout)
            except subprocess.TimeoutExpired as error:
                raise Hung(f"did not end within {timeout:g} s") from error
