"""How many processes a command may measure with at a time: as many as cores and memory are left for, and no more than
``--parallel`` says.

The sessions of one command share the places: those that ``nox --parallel`` starts are processes of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import shutil
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pytest_trlcompat._trust import open_lock
from pytest_trlcompat.matrix.machine import Machine

__all__ = ["VARIABLE", "Place", "Places", "requested_limit", "share_limit"]

VARIABLE = "TRLCOMPAT_PLACES"
"""By which the outermost nox tells the others how many places they share."""

MEMORY = 2 * 1024**3
"""Bytes that a process needs with its launch server and ranks."""
_GROWING = 60.0
"""Seconds in which a process has not yet taken that."""
_LEAST = 0.5
"""Cores that must be left for one more process."""


def requested_limit(command: Sequence[str], environ: MutableMapping[str, str] = os.environ) -> int | None:
    """What ``--parallel`` says, if the command has it."""
    text = environ.get("NOX_PARALLEL", "")
    words = list(command[: command.index("--")] if "--" in command else command)
    for index, word in enumerate(words):
        if match := re.fullmatch(r"(?:--parallel=|-j=?)(\w+)", word):
            text = match[1]
        elif word in ("-j", "--parallel") and index + 1 < len(words):
            text = words[index + 1]
    if text == "auto":
        return os.cpu_count() or 1
    return int(text) if text.isdecimal() and int(text) else None


def share_limit(command: Sequence[str], *, outermost: bool, environ: MutableMapping[str, str] = os.environ) -> None:
    """Have the sessions that this nox starts know what ``--parallel`` says to it; to them it says ``--parallel 1``."""
    if outermost:
        environ.pop(VARIABLE, None)
        if (limit := requested_limit(command, environ)) is not None:
            environ[VARIABLE] = str(limit)


@dataclass
class Place:
    """One that is taken, until it is given back or this process ends.

    Attributes:
        since: when it was taken, by the monotonic clock.
    """

    _file: IO[str]
    since: float = field(default_factory=time.monotonic)

    def give_back(self) -> None:
        self._file.close()


@dataclass
class Places:
    """
    Attributes:
        folder: which the sessions of one command share.
        limit: the places; ``None``: as many as there are cores.
        memory: bytes that a process needs.
    """

    folder: Path
    limit: int | None = None
    machine: Machine = field(default_factory=Machine)
    memory: int = MEMORY
    _taken: list[Place] = field(default_factory=list)

    @classmethod
    def of_command(cls, folder: Path, environ: MutableMapping[str, str] = os.environ) -> Places:
        text = environ.get(VARIABLE, "")
        return cls(folder, int(text) if text.isdecimal() else None)

    def take(self) -> Place | None:
        """A place, the first of this process always, another one where cores and memory are left; else ``None``."""
        self._taken = [place for place in self._taken if not place._file.closed]
        # The first is there whatever else the machine does, since a sweep has to end.
        if self._taken and not self._has_room():
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        for number in range(self.limit or max(math.ceil(self.machine.cores), 1)):
            file = open_lock(self.folder / f"place-{number}")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                continue
            place = Place(file)
            self._taken.append(place)
            return place
        return None

    def remove(self) -> None:
        """Give all back, at the end of the command."""
        for place in self._taken:
            place.give_back()
        with contextlib.suppress(OSError):
            shutil.rmtree(self.folder)

    def _has_room(self) -> bool:
        left = self.machine.cores - self.machine.busy_with_others() - len(self._taken)
        # What those that have just begun are going to take still counts as free memory.
        growing = sum(time.monotonic() - place.since < _GROWING for place in self._taken)
        return left >= _LEAST and self.machine.free_memory() >= self.memory * (1 + growing)
