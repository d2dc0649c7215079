"""Candidates: where they come from, and the context in which each one is tested.

``releases``: the releases of a package; ``stacks``: whole stacks, day by day; ``commits``: the commits of a clone.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pytest_trlcompat.matrix import process
from pytest_trlcompat.matrix.cells import Matrix
from pytest_trlcompat.matrix.environments import Environment, ensure, reserved
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock, compile_versions
from pytest_trlcompat.matrix.suite_run import child_variables
from pytest_trlcompat.stack import PACKAGES, package_of

__all__ = [
    "Candidate",
    "ExecutionContext",
    "Hung",
    "PreparedCandidate",
    "Source",
    "environment_context",
    "lock_exactly",
    "lock_near",
]


class Hung(Exception):
    """The program did not end in time."""


@dataclass(frozen=True)
class ExecutionContext:
    """What a predicate runs its programs in.

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
            # An empty entry of PYTHONPATH would be the current folder.
            behind = filter(None, [variables.get("PYTHONPATH")])
            variables["PYTHONPATH"] = os.pathsep.join([str(self.overlay), *behind])
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


@dataclass(frozen=True)
class Candidate:
    """One point of the ordered range that is searched.

    Attributes:
        key: unique among all candidates of all sources that a journal may see.
        version: as the result names it: ``4.51.3``, ``2025-05-20``, a commit.
        label: as people read it: ``transformers 4.51.3``.
    """

    key: str
    version: str
    label: str


@dataclass(frozen=True)
class PreparedCandidate:
    """A candidate whose versions are known.

    Attributes:
        identity: a digest of all that an observation depends on, apart from the predicate. Candidates of equal identity
            (two days without a release between them) are tested once.
        lock: ``None`` for commits of a repository that is no package of the stack.
        context: makes the execution context, and removes afterwards what only this candidate needed.
    """

    identity: str
    lock: Lock | None
    context: Callable[[Callable[[str], None]], AbstractContextManager[ExecutionContext]]


class Source(Protocol):
    """An ordered range of candidates."""

    @property
    def candidates(self) -> Sequence[Candidate]: ...

    def prepare(self, candidate: Candidate) -> PreparedCandidate:
        """Resolve every version.

        Raises:
            Untestable: when that cannot be; the text is the reason.
        """
        ...

    def clean_up(self) -> None:
        """Remove what a worker that was stopped has left."""
        ...


def lock_exactly(matrix: Matrix, label: str, versions: Mapping[str, str], date: datetime.date) -> Lock:
    """A lock of exactly these versions, and of whatever else they need as of ``date``.

    Raises:
        Untestable: when they are incompatible; the text is the resolver's reason.
    """
    requirements = [f"{name}=={version}" for name, version in sorted(versions.items())]
    return Lock(label, date, matrix.python, compile_versions(matrix, requirements, date), "bisect")


def lock_near(matrix: Matrix, label: str, pins: Mapping[str, str], base: Lock) -> Lock:
    """``base`` with the versions of ``pins``. Other packages of the stack stay, and the rest moves only if it must.

    Raises:
        Untestable: when they are incompatible; the text is the resolver's reason.
    """
    held = {name: version for name, version in base.packages.items() if package_of(name) in PACKAGES}
    requirements = [f"{name}=={version}" for name, version in sorted({**held, **pins}.items())]
    preferred = [f"{name}=={version}" for name, version in base.packages.items() if name not in pins]
    versions = compile_versions(matrix, [*requirements, *matrix.harness], base.date, preferred)
    return Lock(label, base.date, matrix.python, versions, "bisect")


@contextlib.contextmanager
def environment_context(
    lock: Lock, layout: Layout, folder: Path, say: Callable[[str], None]
) -> Iterator[ExecutionContext]:
    """A lock's environment, shared with the matrix; it stays when the candidate is done."""
    with reserved(lock, layout):
        yield ExecutionContext(ensure(lock, layout, say), folder)
