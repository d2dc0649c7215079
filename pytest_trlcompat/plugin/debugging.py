"""Lends the terminal of the run to one rank, for its debugger: ``--trlcompat-debug-rank``."""

from __future__ import annotations

import contextlib
import os
import termios
from collections.abc import Callable, Iterator

import pytest

from pytest_trlcompat.launch.debugging import Debug

__all__ = ["lender"]


def lender(config: pytest.Config, rank: int, where: str) -> Callable[[], contextlib.AbstractContextManager[Debug]]:
    """A context for each launch: pytest captures nothing in it, and the terminal is as before when it ends.

    Args:
        rank: which one gets the terminal.
        where: where the setting stands.
    """

    @contextlib.contextmanager
    def lend() -> Iterator[Debug]:
        capture = config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            # Input too, in whose place pytest puts a file that cannot be read.
            capture.suspend(in_=True)
        try:
            if not os.isatty(0):
                raise pytest.UsageError(
                    f"trlcompat: {where} lends rank {rank} a terminal, but stdin of this process is none; "
                    "run pytest in a terminal, and without -n of pytest-xdist"
                )
            before = termios.tcgetattr(0)
            try:
                yield Debug(rank, os.ttyname(0), post_mortem=bool(config.getoption("usepdb", default=False)))
            finally:
                # A debugger that was ended leaves the terminal as it has set it.
                termios.tcsetattr(0, termios.TCSADRAIN, before)
        finally:
            if capture is not None:
                capture.resume()

    return lend
