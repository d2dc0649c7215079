"""Locks of tool environments: pytest, linters, Sphinx, nox itself. Hashes and comparisons are as for cells.

A tool is a name, requirements and a version of Python. Those that the repository knows have their locks there, which
``nox -s lock`` renews. Any other (another Python, a release of Ray that a cluster has, edited requirements) is resolved
once, and goes on with that, as a cell does.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pytest_trlcompat.matrix import locks
from pytest_trlcompat.matrix.cells import Matrix
from pytest_trlcompat.matrix.files import write_whole
from pytest_trlcompat.matrix.hashes import with_hashes
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock, read_lock

__all__ = ["RUNNER", "Tool", "ToolLock", "kept", "known", "lock_for", "renew", "runner_text", "strays"]

RUNNER = "nox"
"""The tool that runs the others; continuous integration installs it with pip, see :func:`runner_text`."""


@dataclass(frozen=True)
class Tool:
    """What a tool environment holds.

    Attributes:
        name: how its folder begins: ``unit``, ``lint``.
        requirements: as pip understands them.
        python: ``3.11``.
    """

    name: str
    requirements: tuple[str, ...]
    python: str

    @property
    def id(self) -> str:
        return f"{self.name}-{self.python}"

    @property
    def request(self) -> str:
        """A digest of what the resolver is given; a lock of another one is out of date."""
        return locks.digest(self.python, *self.requirements)


@dataclass(frozen=True)
class ToolLock(Lock):
    """The lock of a tool. Its environment is named by the tool, since two tools share none."""

    @property
    def kind(self) -> str:
        return self.cell_id.rpartition("-")[0]


def lock_for(tool: Tool, matrix: Matrix, layout: Layout) -> ToolLock:
    """The lock of a tool: from the repository, else resolved before, else resolved now.

    Raises:
        Untestable: when it cannot be resolved; the text is the resolver's reason.
    """
    path = layout.resolved_tools / f"{tool.id}.txt"
    lock = kept(tool, layout) or _valid(path, tool)
    if lock is None:
        lock = _resolve(tool, matrix)
        write_whole(path, lock.to_text())
    return lock


def kept(tool: Tool, layout: Layout) -> ToolLock | None:
    """The lock of a tool in the repository, unless it is out of date."""
    return _valid(layout.tool_locks / f"{tool.id}.txt", tool)


def known(layout: Layout) -> list[ToolLock]:
    """All locks of tools, of the repository and resolved ones."""
    folders = (layout.tool_locks, layout.resolved_tools)
    return [_read(path) for folder in folders for path in sorted(folder.glob("*.txt"))]


def renew(tool: Tool, matrix: Matrix, layout: Layout) -> ToolLock:
    """Resolve a tool and write its lock into the repository."""
    lock = _resolve(tool, matrix)
    write_whole(layout.tool_locks / f"{tool.id}.txt", lock.to_text())
    return lock


def strays(tools: Iterable[Tool], layout: Layout) -> list[Path]:
    """Lock files in the repository that belong to none of these tools."""
    ids = {tool.id for tool in tools}
    return [path for path in sorted(layout.tool_locks.glob("*.txt")) if path.stem not in ids]


def runner_text(lock: ToolLock, layout: Layout) -> str:
    """What pip installs nox from in continuous integration, before there is any environment: a lock with its hashes."""
    lines = with_hashes(lock.releases, lock.python, layout)
    header = (
        f"# nox and uv with all they need, for pip: the lock of {lock.cell_id} with hashes. `nox -s lock` writes it.\n"
    )
    return header + "".join(f"{line}\n" for line in lines)


def _resolve(tool: Tool, matrix: Matrix) -> ToolLock:
    date = datetime.datetime.now(datetime.timezone.utc).date()
    versions = locks.compile_versions(dataclasses.replace(matrix, python=tool.python), tool.requirements, date)
    return ToolLock(tool.id, date, tool.python, versions, tool.request)


def _valid(path: Path, tool: Tool) -> ToolLock | None:
    lock = _read(path) if path.is_file() else None
    return lock if lock is not None and lock.request == tool.request else None


def _read(path: Path) -> ToolLock:
    return ToolLock(**vars(read_lock(path)))
