"""The groups of launches of a cell, and which process has taken which: how several run the suites of one cell.

All of them collect the same tests, put them into the same groups in the same order, and take one group after the other.
A group is a file; who runs it holds a lock on that, which the kernel releases when the process dies, so that another
one then takes the group. Imports only the standard library: the processes are pytest's, in the cell's environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pytest_trlcompat._trust import open_lock
from pytest_trlcompat.matrix.files import write_whole

__all__ = ["ATTEMPTS", "Claim", "Group", "GroupTable", "ordered"]

ATTEMPTS = 2
"""How often a group is begun: one that ends its process each time would end every process."""

_GROUPS, _PLAN = "groups.json", "plan.json"
_BEGUN, _DONE = b"begun\n", b"done %.1f\n"
_DONE_LINE = re.compile(rb"^done (\d+\.\d)$", re.MULTILINE)


@dataclass(frozen=True)
class Group:
    """Tests that judge the same launches.

    Attributes:
        seconds: what it took before, or an estimate.
        is_first_answer: whether it judges issues by which another model is trained or saved.
    """

    name: str
    seconds: float
    is_first_answer: bool = False


def ordered(groups: Sequence[Group], *, first_answer: bool) -> list[Group]:
    """Those that take longest first, so that none is left alone at the end.

    Args:
        first_answer: first those with the most important issues, the shortest first, so that there is soon an answer.
    """
    if not first_answer:
        return sorted(groups, key=lambda group: (-group.seconds, group.name))
    answers = sorted(
        (group for group in groups if group.is_first_answer), key=lambda group: (group.seconds, group.name)
    )
    return answers + ordered([group for group in groups if not group.is_first_answer], first_answer=False)


@dataclass
class Claim:
    """A group that this process has taken."""

    group: Group
    _file: IO[str]
    _since: float = field(default_factory=time.monotonic)

    def begins(self) -> None:
        """Its first test runs now: a group is taken before the last test of the one before."""
        self._since = time.monotonic()

    def done(self) -> None:
        """All tests of the group have run."""
        _append(self._file, _DONE % (time.monotonic() - self._since))
        self._file.close()


@dataclass
class GroupTable:
    """The groups of one run of a cell, in a folder that its processes share."""

    folder: Path
    _groups: list[Group] | None = None
    _begun: set[str] = field(default_factory=set)
    _seconds: dict[str, float] = field(default_factory=dict)

    def plan(self, seconds: Mapping[str, float], *, first_answer: bool) -> None:
        """What the processes need to put their groups into order: what groups took before, and see :func:`ordered`."""
        write_whole(self.folder / _PLAN, json.dumps({"seconds": dict(seconds), "first_answer": first_answer}))

    def arrange(self, tests: Mapping[str, int], answers: Sequence[str]) -> list[Group]:
        """The groups in the order in which they are to run; writes them down for :attr:`groups`.

        Args:
            tests: the number of tests of each group.
            answers: those with the most important issues.
        """
        plan = json.loads((self.folder / _PLAN).read_text(encoding="utf-8"))
        known: dict[str, float] = plan["seconds"]
        both = [name for name in tests if name in known]
        # A group that has not run yet is taken to need, for each of its tests, what those that have run needed.
        rate = sum(known[name] for name in both) / sum(tests[name] for name in both) if both else 1.0
        groups = [Group(name, known.get(name, count * rate), name in answers) for name, count in tests.items()]
        groups = ordered(groups, first_answer=plan["first_answer"])
        rows = [[group.name, group.seconds, group.is_first_answer] for group in groups]
        write_whole(self.folder / _GROUPS, json.dumps(rows))  # each process writes the same
        return groups

    @property
    def groups(self) -> list[Group] | None:
        """As a process has arranged them; ``None``: none has come so far."""
        if self._groups is None:
            with contextlib.suppress(FileNotFoundError):
                rows = json.loads((self.folder / _GROUPS).read_text(encoding="utf-8"))
                self._groups = [Group(*row) for row in rows]
        return self._groups

    def claim(self, groups: Sequence[Group]) -> Claim | None:
        """Take the first of these groups that no process runs or has run; ``None``: there is none."""
        for group in groups:
            # Closed on exec, so that no launch server holds it.
            file = open_lock(self._path(group))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                continue
            # Read under the lock: until now another process may have held it and have run the group.
            written = self._written(group)
            if _DONE_LINE.search(written) or written.count(_BEGUN) >= ATTEMPTS:
                file.close()
                continue
            _append(file, _BEGUN)
            return Claim(group, file)
        return None

    def seconds(self, groups: Sequence[Group]) -> dict[str, float]:
        """What those took of which all tests have run, by name."""
        for group in groups:  # what is done stays so, and is not read again
            if group.name not in self._seconds and (match := _DONE_LINE.search(self._written(group))):
                self._seconds[group.name] = float(match[1])
        return {group.name: self._seconds[group.name] for group in groups if group.name in self._seconds}

    def open(self, groups: Sequence[Group]) -> list[Group]:
        """Those that no process has begun."""
        # What was begun once stays so, and its file is not read again.
        self._begun |= {group.name for group in groups if group.name not in self._begun and self._written(group)}
        return [group for group in groups if group.name not in self._begun]

    def _written(self, group: Group) -> bytes:
        try:
            return self._path(group).read_bytes()
        except FileNotFoundError:
            return b""

    def _path(self, group: Group) -> Path:
        # Names of groups are chosen by suites, and may hold what no file name can.
        return self.folder / f"group-{hashlib.sha256(group.name.encode()).hexdigest()[:16]}"


def _append(file: IO[str], line: bytes) -> None:
    # open_lock opens at the beginning, where the lines of an earlier attempt may stand.
    os.lseek(file.fileno(), 0, os.SEEK_END)
    os.write(file.fileno(), line)
