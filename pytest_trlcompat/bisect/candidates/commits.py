"""Candidates: the commits of a local git clone, whose checkout is not touched.

A commit of a package of the stack is installed into a folder of its own, which hides the release in the environment
that all commits share. A commit of anything else is tested in its own files.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from pytest_trlcompat import _processes
from pytest_trlcompat._trust import open_lock
from pytest_trlcompat.bisect.candidates import Candidate, ExecutionContext, PreparedCandidate
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.bisect.workers import WORKER_VARIABLE
from pytest_trlcompat.matrix.environments import Environment, ensure, reserved
from pytest_trlcompat.matrix.errors import Untestable
from pytest_trlcompat.matrix.files import locked
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.matrix.process import deferred_signals
from pytest_trlcompat.matrix.uv import uv_cached_first

__all__ = ["Clone", "Commit", "Commits", "commits_between", "is_over"]

_STAMP = ".trlcompat-built"


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
    """A git clone on this machine.

    Attributes:
        option: by which it was named, for messages.
    """

    path: Path
    option: str = "--clone"

    @property
    def named(self) -> str:
        """As it was named."""
        return f"{self.option} {self.path}"

    def check(self, *, may_be_dirty: bool = False) -> None:
        """
        Raises:
            BisectError: when it is no clone, or has changes that are part of no commit.
        """
        if not self.path.is_dir():
            raise BisectError(f"{self.named}: no such folder; name the folder of a git clone")
        bare = self._git("rev-parse", "--is-bare-repository", failure=f"{self.named}: not a git clone")
        if bare.strip() == "true":
            return  # nothing is checked out there
        # Each line has two letters for the file's state and a space before its path.
        changed = self._git("status", "--porcelain", "--untracked-files=no").splitlines()
        if changed and not may_be_dirty:
            raise BisectError(
                f"{self.named}: {len(changed)} file{'s have' if len(changed) > 1 else ' has'} uncommitted "
                f"changes ({changed[0][3:]}), which no tested commit would contain; commit or stash them, or leave "
                "them out with --allow-dirty"
            )

    def commit(self, revision: str) -> Commit:
        """
        Raises:
            BisectError: for a revision that the clone does not have.
        """
        answer = self._git(
            # What a person typed is a revision, even if it begins with a dash.
            *("log", "-1", "--format=%H%x09%cs%x09%s", "--end-of-options", f"{revision}^{{commit}}", "--"),
            failure=f"{self.named}: unknown revision {revision!r}; fetch it (git fetch --tags), or name another",
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
            f"{self.named}: no tag for release {version}, such as v{version}; fetch the tags: git fetch --tags"
        )

    def base(self, commit: str, other: str) -> Commit:
        """The commit at which two histories diverged; the earlier commit when they did not.

        Raises:
            BisectError: when their histories have nothing in common.
        """
        merge_base = self._git(
            *("merge-base", commit, other),
            failure=f"{self.named}: {commit} and {other} have no common history; if the clone is shallow, run: "
            "git fetch --unshallow",
        )
        return self.commit(merge_base.strip())

    def history(self, first: str, last: str) -> list[Commit]:
        """From ``first`` to ``last`` along the first parents, both included; a merge commit counts as one commit.

        ``first`` must be an ancestor of ``last``.
        """
        answer = self._git("log", "--first-parent", "--reverse", "--format=%H%x09%cs%x09%s", f"{first}..{last}", "--")
        # git's range leaves out the commit at which it begins.
        return [self.commit(first), *(Commit(*line.split("\t", 2)) for line in answer.splitlines())]

    @contextlib.contextmanager
    def worktree(self, commit: Commit, folder: Path) -> Iterator[Path]:
        """The files of a commit in a folder of their own, removed afterwards; the clone's checkout stays as it is.

        Raises:
            BisectError: when git cannot create it.
        """
        try:
            # --force: a killed worker may have left an entry for this folder, with or without its files.
            self._change_worktrees(folder.parent, "add", "--force", "--quiet", "--detach", str(folder), commit.sha)
            yield folder
        finally:
            self.remove_worktree(folder)

    def remove_worktree(self, folder: Path) -> None:
        """Remove a worktree, also one that git does not know."""
        with contextlib.suppress(BisectError):
            # The second --force removes a worktree that git holds for locked.
            self._change_worktrees(folder.parent, "remove", "--force", "--force", str(folder))
        shutil.rmtree(folder, ignore_errors=True)

    def worktrees(self, below: Path) -> list[Path]:
        """All worktrees in a folder that git knows, including those whose files are gone."""
        with _one_at_a_time(below) as lock:
            lines = self._git("worktree", "list", "--porcelain", hold=lock).splitlines()
        known = [Path(line.partition(" ")[2]) for line in lines if line.startswith("worktree ")]
        # git names worktrees by their resolved paths.
        return [folder for folder in known if folder.parent == below.resolve()]

    def remove_worktrees(self, below: Path, *, own_too: bool) -> int:
        """Remove the worktrees in a folder whose process has ended, and return how many.

        Args:
            own_too: also those of this process, which is done with them.
        """
        count = 0
        # git lists worktrees whose files are gone, and may not know a folder whose adding was interrupted.
        for folder in {*self.worktrees(below), *below.glob("tree-*")}:
            if is_over(folder.name.rpartition("-")[2], own_too=own_too):
                self.remove_worktree(folder)
                count += 1
        return count

    def _change_worktrees(self, below: Path, *arguments: str) -> None:
        """Worktrees of one clone are changed one at a time, and not left half done by a worker that is killed."""
        with deferred_signals(), _one_at_a_time(below) as lock:
            self._git("worktree", *arguments, hold=lock)

    def _git(self, *arguments: str, failure: str = "", hold: int | None = None) -> str:
        # Set by git itself for the command of `git bisect run`, and by hooks: they would lead to another repository.
        # Without a worker's mark git is not killed with the worker, and leaves nothing half done in the clone.
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("GIT_", WORKER_VARIABLE))
        }
        # The owner's hooks must not run, nor may a check of signatures print among the lines that are read.
        settings = ("-c", "core.hooksPath=/dev/null", "-c", "log.showSignature=false")
        command = ["git", "-C", str(self.path), *settings, *arguments]
        # No download of large files, no lock for a refreshed index in the owner's clone, messages in English.
        variables = {**inherited, "GIT_LFS_SKIP_SMUDGE": "1", "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
        try:
            done = subprocess.run(
                command,
                env=variables,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                pass_fds=() if hold is None else (hold,),
            )
        except FileNotFoundError as error:
            raise BisectError("git was not found on PATH; install it to bisect by commit") from error
        if done.returncode != 0:
            reason = done.stderr.strip().splitlines()[:1] or [f"git ended with exit status {done.returncode}"]
            raise BisectError(failure or f"{self.named}: git {arguments[0]}: {reason[0]}")
        return done.stdout


def commits_between(clone: Clone, first: str, last: str) -> tuple[list[Commit], str]:
    """The commits to search, and a note where the search starts at another commit than ``first``.

    Releases are often made on branches of their own: then the search starts where the branch began.

    Raises:
        BisectError: for unknown revisions, or when ``last`` comes before ``first``.
    """
    start, other = clone.commit(first), clone.commit(last)
    base = clone.base(start.sha, other.sha)
    if base.sha == other.sha and start.sha != other.sha:
        raise BisectError(
            f"{clone.named}: {last} is an ancestor of {first}; the bad commit must be the later one, with "
            "--find-fix the good one: swap --good and --bad, or add or remove --find-fix"
        )
    note = ""
    if base.sha != start.sha:
        note = f"{first} is on another branch than {last}; the search starts at {base.short}, where they diverged"
    return clone.history(base.sha, other.sha), note


@dataclass(frozen=True)
class Commits:
    """Commits of a clone.

    Attributes:
        package: which package of the stack the clone is; ``None``: commits are tested in their own files.
        lock: the versions of everything but ``package``; ``None`` without a package.
        work: a folder for the files of commits, and for commits that were installed.
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
        name = f"{self.package} {commit.short}" if self.package else commit.short
        return Candidate(self._identity(commit), commit.sha, f"{name} ({commit.subject[:60]})")

    def prepare(self, candidate: Candidate) -> PreparedCandidate:
        commit = next(commit for commit in self.commits if commit.sha == candidate.version)
        context = self._files_context if self.lock is None else self._installed_context
        return PreparedCandidate(self._identity(commit), self.lock, partial(context, commit))

    def _identity(self, commit: Commit) -> str:
        return f"{commit.sha[:16]}-{self.lock.digest if self.lock else 'files'}"

    @contextlib.contextmanager
    def _files_context(self, commit: Commit, say: Callable[[str], None]) -> Iterator[ExecutionContext]:
        with self.clone.worktree(commit, self._worktree_folder(commit)) as folder:
            yield ExecutionContext(None, folder)

    @contextlib.contextmanager
    def _installed_context(self, commit: Commit, say: Callable[[str], None]) -> Iterator[ExecutionContext]:
        assert self.lock is not None
        with reserved(self.lock, self.layout):
            environment = ensure(self.lock, self.layout, say)
            yield ExecutionContext(environment, self.folder, self._overlay(commit, environment, say))

    def _overlay(self, commit: Commit, environment: Environment, say: Callable[[str], None]) -> Path:
        """The folder with an installed commit, which is installed there unless it is already."""
        overlay = self.work / f"installed-{self._unique_name(commit)}"
        with locked(overlay.with_suffix(".lock"), lambda: say("waiting for another process that is installing it")):
            if not (overlay / _STAMP).is_file():
                say(f"installing {self.package} {commit.short}")
                shutil.rmtree(overlay, ignore_errors=True)
                with self.clone.worktree(commit, self._worktree_folder(commit)) as files:
                    _install(files, overlay, environment)
                # Last, so that an interrupted installation is made again.
                (overlay / _STAMP).touch()
        return overlay

    def clean_up(self) -> None:
        """Remove the files of commits whose process has ended, or is this one, which is done with them."""
        with deferred_signals():
            self.clone.remove_worktrees(self.work.resolve(), own_too=True)

    def _worktree_folder(self, commit: Commit) -> Path:
        """Where the files of a commit are for this process."""
        # Not for others: two commands may need the files of the same commit at the same time.
        return self.work / f"tree-{commit.sha[:12]}-{os.getpid()}"

    def _unique_name(self, commit: Commit) -> str:
        source = f"{self.clone.path.resolve()} {self._identity(commit)}"
        return f"{commit.sha[:12]}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"


def is_over(process: str, *, own_too: bool) -> bool:
    """Whether a process has ended, by the number in a folder's name.

    Args:
        own_too: whether this process counts as ended.
    """
    if not process.isdigit():
        return True  # of a release that wrote no number
    return own_too if int(process) == os.getpid() else not _processes.is_alive(int(process))


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[int]:
    """A lock that git inherits, so that it is held until git has ended, even when this process is killed before."""
    folder.mkdir(parents=True, exist_ok=True)
    with open_lock(folder / ".worktrees.lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


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
