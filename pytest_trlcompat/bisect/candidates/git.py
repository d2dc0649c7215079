"""A local git clone, read without touching what its owner has checked out.

Imports only the standard library and the matrix.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.bisect.workers import MARK
from pytest_trlcompat.matrix.process import deferred_signals

__all__ = ["Clone", "Commit"]


@dataclass(frozen=True)
class Commit:
    """One commit.

    Attributes:
        day: of the committer's date.
    """

    sha: str
    day: str
    subject: str

    @property
    def short(self) -> str:
        return self.sha[:10]


@dataclass(frozen=True)
class Clone:
    """A clone on this machine."""

    path: Path

    def check(self, *, may_be_dirty: bool = False) -> None:
        """
        Raises:
            BisectError: when it is no clone, or has changes that are part of no commit.
        """
        if not self.path.is_dir():
            raise BisectError(f"--clone {self.path}: there is no such folder; give the folder of a git clone")
        bare = self._git("rev-parse", "--is-bare-repository", otherwise=f"--clone {self.path}: this is no git clone")
        if bare.strip() == "true":
            return  # nothing is checked out there
        changed = self._git("status", "--porcelain", "--untracked-files=no").splitlines()
        if changed and not may_be_dirty:
            raise BisectError(
                f"--clone {self.path}: {len(changed)} file{'s have' if len(changed) > 1 else ' has'} changes that are "
                f"not committed ({changed[0][3:]}), so they would be in none of the commits that are tested; commit or "
                "stash them, or say --allow-dirty to leave them out knowingly"
            )

    def commit(self, revision: str) -> Commit:
        """
        Raises:
            BisectError: for a revision that the clone does not have.
        """
        answer = self._git(
            *("log", "-1", "--format=%H%x09%cs%x09%s", "--end-of-options", f"{revision}^{{commit}}", "--"),
            otherwise=f"--clone {self.path}: the revision {revision!r} is unknown there; fetch it first (git fetch "
            "--tags), or name another",
        )
        return Commit(*answer.rstrip("\n").split("\t", 2))

    def tag_of(self, version: str) -> str:
        """The tag of a release.

        Raises:
            BisectError: when there is none.
        """
        tags = set(self._git("tag", "--list", f"*{version}").split())
        for name in (f"v{version}", version, f"release-{version}"):
            if name in tags:
                return name
        raise BisectError(
            f"--clone {self.path}: no tag for release {version} (v{version} was looked for); fetch the tags: git fetch "
            "--tags"
        )

    def base(self, one: str, other: str) -> Commit:
        """The commit from which two went apart; one of them when they did not.

        Raises:
            BisectError: when their histories have nothing in common.
        """
        found = self._git(
            *("merge-base", one, other),
            otherwise=f"--clone {self.path}: {one} and {other} have no history in common; is the clone shallow? "
            "(git fetch --unshallow)",
        )
        return self.commit(found.strip())

    def history(self, first: str, last: str) -> list[Commit]:
        """From ``first`` to ``last`` along the first parents, both included; a merge stands for what it merged.

        ``first`` must be an ancestor of ``last``.
        """
        answer = self._git("log", "--first-parent", "--reverse", "--format=%H%x09%cs%x09%s", f"{first}..{last}", "--")
        return [self.commit(first), *(Commit(*line.split("\t", 2)) for line in answer.splitlines())]

    def diff(self, first: str, last: str) -> str:
        """Which files changed, and by how much."""
        return self._git("diff", "--stat=100", first, last, "--").rstrip()

    @contextlib.contextmanager
    def worktree(self, commit: Commit, folder: Path) -> Iterator[Path]:
        """The files of a commit in a folder of their own, gone afterwards; the clone's checkout stays as it is.

        Raises:
            BisectError: when git cannot make it.
        """
        try:
            self._change_worktrees(folder.parent, "add", "--force", "--quiet", "--detach", str(folder), commit.sha)
            yield folder
        finally:
            self.remove_worktree(folder)

    def remove_worktree(self, folder: Path) -> None:
        """Take a worktree away that nobody needs any more."""
        with contextlib.suppress(BisectError):  # git does not know it
            self._change_worktrees(folder.parent, "remove", "--force", "--force", str(folder))
        shutil.rmtree(folder, ignore_errors=True)

    def worktrees(self, below: Path) -> list[Path]:
        """All of a folder that git knows of, those included whose files are gone."""
        with _one_at_a_time(below) as lock:
            lines = self._git("worktree", "list", "--porcelain", hold=lock).splitlines()
        known = [Path(line.partition(" ")[2]) for line in lines if line.startswith("worktree ")]
        return [folder for folder in known if folder.parent == below.resolve()]

    def _change_worktrees(self, below: Path, *arguments: str) -> None:
        """Worktrees of one clone are not made at the same time, nor left half made by a worker that is killed."""
        with deferred_signals(), _one_at_a_time(below) as lock:
            self._git("worktree", *arguments, hold=lock)

    def _git(self, *arguments: str, otherwise: str = "", hold: int | None = None) -> str:
        # Set by git itself for the command of `git bisect run`, and by hooks: they would lead to another repository.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", MARK))}
        # Hooks of the clone's owner are not for us.
        settings = ("-c", "core.hooksPath=/dev/null", "-c", "log.showSignature=false")
        command = ["git", "-C", str(self.path), *settings, *arguments]
        variables = {**inherited, "GIT_LFS_SKIP_SMUDGE": "1", "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
        try:
            done = subprocess.run(command, env=variables, capture_output=True, text=True, errors="replace", check=False)
        except FileNotFoundError as error:
            raise BisectError("git was not found on PATH; install it to bisect by commit") from error
        if done.returncode != 0:
            reason = done.stderr.strip().splitlines()[:1] or [f"git ended with exit status {done.returncode}"]
            raise BisectError(otherwise or f"--clone {self.path}: git {arguments[0]}: {reason[0]}")
        return done.stdout


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[int]:
    """A lock that git inherits, so that it is held until git has ended, also where the one who called it was killed."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".worktrees.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()
