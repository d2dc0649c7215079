"""What the programs of one rank start, and the errors of it.

Runs in ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from pytest_trlcompat.launch.program import Program

__all__ = ["ADVICE", "NestedLauncherError", "Replaced", "Starts"]

ADVICE = "pass what it runs as the command, or have it start no launcher"
"""How the message of most refused starts ends."""


class NestedLauncherError(RuntimeError):
    """A command starts ranks that are not this launch's, or another program of Python's that would be none."""


class Replaced(BaseException):
    """Ends a program that has replaced itself by ``os.exec*``; not an ``Exception``, so that it is not handled there.

    Attributes:
        status: the exit status of what has run in its place.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass
class Starts:
    """What the programs of one rank start.

    Attributes:
        running: the program that runs.
        run: runs another one to its end within the call, and returns its exit status.
        refused: the first start that was refused, which fails the launch also where the program handles the error.
        replaced: whether a program has replaced itself, and must have ended with that.
        path: ``sys.path`` before the first program's folder was put there.
        pid: the process that is the rank.
    """

    running: Program
    run: Callable[[Program], int]
    refused: NestedLauncherError | None = field(default=None)
    replaced: Replaced | None = field(default=None)
    path: tuple[str, ...] = ()
    pid: int = field(default_factory=os.getpid)

    def refuse(self, text: str) -> NoReturn:
        """Raises: NestedLauncherError, and keeps the first."""
        error = NestedLauncherError(text)
        self.refused = self.refused or error
        # Its text has what it follows from, where it is raised while another error is handled.
        raise error from None
