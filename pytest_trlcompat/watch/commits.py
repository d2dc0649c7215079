"""Commits of local git clones, tried like releases that are not out yet: such as the newest one of a main branch."""

from __future__ import annotations

import datetime
import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from pytest_trlcompat.bisect.candidates.commits import Clone, Commit
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.matrix import commit_wheels
from pytest_trlcompat.matrix.commit_wheels import CommitWheel
from pytest_trlcompat.matrix.covering.releases import Release
from pytest_trlcompat.matrix.errors import MatrixError, Untestable
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.parsing import parse_day
from pytest_trlcompat.stack import REQUIRED

__all__ = ["AskedCommit", "WatchedCommit", "parse_commit"]

_OPTION = "--commit"
_BUILDABLE = tuple(package for package in REQUIRED if package != "torch")


@dataclass(frozen=True)
class AskedCommit:
    """What ``--commit PACKAGE=FOLDER[@REVISION]`` names."""

    package: str
    clone: Clone
    revision: str

    def build(self, python: str, layout: Layout) -> WatchedCommit:
        """
        Raises:
            MatrixError: when the clone or the revision is not there.
            Untestable: when the commit cannot be built, with the reason.
        """
        commit = self.clone.commit(self.revision)
        # remove_worktrees knows by this name, and the number at its end, whose files they were.
        folder = layout.commits.resolve() / f"tree-{commit.sha[:12]}-{os.getpid()}"
        files = functools.partial(self.clone.worktree, commit, folder)
        try:
            wheel = commit_wheels.build(self.package, commit.sha, files, python, layout)
        except Untestable as error:
            raise Untestable(f"{self.package} {commit.short} ({commit.subject}) cannot be built: {error}") from error
        return WatchedCommit(self.package, self.clone, commit, wheel)

    def clean_up(self, layout: Layout) -> None:
        """Remove the files of commits that a killed command has left, which git knows as worktrees."""
        self.clone.remove_worktrees(layout.commits.resolve(), own_too=True)


@dataclass(frozen=True)
class WatchedCommit:
    """A commit with its wheel."""

    package: str
    clone: Clone
    commit: Commit
    wheel: CommitWheel

    @property
    def release(self) -> Release:
        """As if it had been released on the day it was committed."""
        return Release(self.package, self.wheel.version, self.day, self.wheel.requires)

    @property
    def day(self) -> datetime.date:
        return parse_day(self.commit.day)

    def is_released(self, known: Iterable[Version]) -> bool:
        """Whether it is the commit of a release that is known, by the clone's tag."""
        if Version(self.wheel.public) not in frozenset(known):
            return False
        try:
            return self.clone.commit(self.clone.tag_of(self.wheel.public)).sha == self.commit.sha
        except BisectError:  # no tag
            return False


def parse_commit(text: str) -> AskedCommit:
    """``trl=../trl``, what is checked out there, or ``trl=../trl@origin/main``.

    Raises:
        MatrixError: for another form, a package that cannot be built, or a folder that is no clone.
    """
    package, sign, named = text.partition("=")
    if not sign or not named:
        raise MatrixError(f"{_OPTION} {text}: write PACKAGE=FOLDER or PACKAGE=FOLDER@REVISION, for example trl=../trl")
    if package not in _BUILDABLE:
        raise MatrixError(f"{_OPTION} {text}: the package must be one of {', '.join(_BUILDABLE)}")
    folder, revision = named, "HEAD"
    # A folder may have an @ in its name: it is tried as it stands first.
    if not Path(named).expanduser().is_dir() and "@" in named:
        folder, _, revision = named.rpartition("@")
    clone = Clone(Path(folder).expanduser().resolve(), _OPTION)
    # The commit's files are taken, whatever has been changed since.
    clone.check(may_be_dirty=True)
    clone.commit(revision)
    return AskedCommit(package, clone, revision)
