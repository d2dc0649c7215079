"""Candidates: the commits of a local clone. Imports only the standard library and the matrix.

A commit of a package of the stack is installed into a folder of its own, which hides the release in the environment
that all commits share; a commit of anything else is tested in its own files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from pytest_trlcompat.bisect.candidates.base import Candidate, Place, Prepared
from pytest_trlcompat.bisect.candidates.git import Clone, Commit
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.matrix.environments import Environment, ensure
from pytest_trlcompat.matrix.errors import Untestable
from pytest_trlcompat.matrix.files import locked
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.matrix.process import deferred_signals
from pytest_trlcompat.matrix.uv import uv_cached_first

__all__ = ["Commits", "span"]

_STAMP = ".trlcompat-built"


def span(clone: Clone, first: str, last: str) -> tuple[list[Commit], str]:
    """The commits to search, and a line about it where the first end is another than was asked for.

    Releases are often cut on branches of their own: then the search starts where the branch left.

    Raises:
        BisectError: for unknown revisions, or ends of which the second comes first.
    """
    one, other = clone.commit(first), clone.commit(last)
    base = clone.base(one.sha, other.sha)
    if base.sha == other.sha and one.sha != other.sha:
        raise BisectError(
            f"--clone {clone.path}: {last} comes before {first} in its history; swap them, or take --find-fix away or "
            "add it: it says that the good one is the later one"
        )
    said = ""
    if base.sha != one.sha:
        said = f"{first} lies on a branch beside {last}; the search starts at {base.short}, where the branch left"
    return clone.history(base.sha, other.sha), said


@dataclass(frozen=True)
class Commits:
    """Commits of a clone.

    Attributes:
        package: of the stack; ``None``: the commits are tested in their own files.
        lock: the environment's, all but ``package``; ``None`` without a package.
        work: a folder for the files of commits and for what is installed of them.
    """

    clone: Clone
    commits: Sequence[Commit]
    package: str | None
    lock: Lock | None
    layout: Layout
    folder: Path
    work: Path

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        return tuple(self._candidate(commit) for commit in self.commits)

    def _candidate(self, commit: Commit) -> Candidate:
        of = f"{self.package} {commit.short}" if self.package else commit.short
        return Candidate(self._identity(commit), commit.sha, f"{of} ({commit.subject[:60]})")

    def prepare(self, candidate: Candidate) -> Prepared:
        commit = next(commit for commit in self.commits if commit.sha == candidate.version)
        place = self._files if self.lock is None else self._installed
        return Prepared(self._identity(commit), self.lock, partial(place, commit))

    def _identity(self, commit: Commit) -> str:
        return f"{commit.sha[:16]}-{self.lock.digest if self.lock else 'files'}"

    @contextlib.contextmanager
    def _files(self, commit: Commit, say: Callable[[str], None]) -> Iterator[Place]:
        with self.clone.worktree(commit, self._tree(commit)) as folder:
            yield Place(None, folder)

    @contextlib.contextmanager
    def _installed(self, commit: Commit, say: Callable[[str], None]) -> Iterator[Place]:
        assert self.lock is not None
        environment = ensure(self.lock, self.layout, say)
        overlay = self.work / f"installed-{self._unique(commit)}"
        with locked(overlay.with_suffix(".lock"), lambda: say("another process installs it")):
            if not (overlay / _STAMP).is_file():
                say(f"installing {self.package} {commit.short}")
                shutil.rmtree(overlay, ignore_errors=True)
                with self.clone.worktree(commit, self._tree(commit)) as files:
                    _install(files, overlay, environment)
                (overlay / _STAMP).touch()
        with environment.used():
            yield Place(environment, self.folder, overlay)

    def tidy(self) -> None:
        """Take away the files of commits whose process has ended, or is this one, which is done with them."""
        with deferred_signals():
            ours = self.work.resolve()
            for folder in {*self.clone.worktrees(ours), *ours.glob("tree-*")}:
                owner = int(folder.name.rpartition("-")[2])
                if owner == os.getpid() or not Path(f"/proc/{owner}").exists():
                    self.clone.remove_worktree(folder)

    def _tree(self, commit: Commit) -> Path:
        """Two commands may want the same commit's files at a time."""
        return self.work / f"tree-{commit.sha[:12]}-{os.getpid()}"

    def _unique(self, commit: Commit) -> str:
        where = f"{self.clone.path.resolve()} {self._identity(commit)}"
        return f"{commit.sha[:12]}-{hashlib.sha256(where.encode()).hexdigest()[:8]}"


def _install(files: Path, overlay: Path, environment: Environment) -> None:
    """
    Raises:
        Untestable: when the commit cannot be built.
    """
    try:
        uv_cached_first(
            [
                *("pip", "install", "--quiet", "--no-deps", "--no-build-isolation"),
                *("--python", str(environment.python), "--target", str(overlay), str(files)),
            ]
        )
    except Untestable as error:
        raise Untestable(f"the commit cannot be installed: {error}") from error
