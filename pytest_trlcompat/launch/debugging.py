"""A debugger in one rank: it gets the terminal of the test process, and nothing ends it for taking long.

A rank is in a session of its own, so the terminal does not control it. The rank may read from the terminal at any time,
and Ctrl-C reaches the test process, which ends the launch.
"""

from __future__ import annotations

import bdb
import os
import pdb
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

__all__ = ["PATIENCE", "Debug", "attach", "ignore_breakpoints", "post_mortem", "quit_reason", "wait_longer"]

PATIENCE = timedelta(days=7).total_seconds()
"""Seconds after which even a launch that is debugged ends."""


@dataclass(frozen=True)
class Debug:
    """Which rank gets a terminal.

    Attributes:
        rank: its number among all ranks.
        terminal: the device's path.
        post_mortem: whether the debugger also starts when its function raises.
    """

    rank: int
    terminal: str
    post_mortem: bool = False


def attach(terminal: str) -> None:
    """Make a terminal this process's input and output."""
    # Without O_NOCTTY it could become this session's controlling terminal, and Ctrl-C would reach the rank.
    descriptor = os.open(terminal, os.O_RDWR | os.O_NOCTTY)
    for standard in (0, 1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    # New ones: those that there are believe in files, of which the first has ended and the others can be sought in.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def ignore_breakpoints() -> None:
    """Make the other ranks go on; in their next collective they wait for the one with the debugger."""
    sys.breakpointhook = lambda *_, **__: None
    pdb.set_trace = lambda *_, **__: None


def wait_longer() -> None:
    """Have the process groups of this process wait for a rank that stands in a debugger."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return
    longer = timedelta(seconds=PATIENCE)
    init = distributed.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 3:  # backend, init_method, timeout
            kwargs["timeout"] = longer
        return init(*args, **kwargs)

    # torch.distributed re-exports both names, so callers reach them by either module.
    modules: tuple[Any, ...] = (distributed, distributed.distributed_c10d)
    for module in modules:
        module.init_process_group = init_process_group
        module.default_pg_timeout = longer


def post_mortem(error: BaseException, rank: int) -> None:
    """Start the debugger where an exception was raised, unless a person or pytest has ended the function."""
    if isinstance(error, Exception) and not isinstance(error, bdb.BdbQuit):
        print(f"rank {rank} raised {type(error).__name__}: {error}", file=sys.stderr)
        pdb.post_mortem(error.__traceback__)


def quit_reason(error: BaseException) -> str:
    """What to do, for an exception of a debugger that found no terminal; empty for others."""
    if not isinstance(error, bdb.BdbQuit):
        return ""
    rank = os.environ.get("RANK", "0")
    return f"a rank has no terminal; pytest --trlcompat-debug-rank={rank} gives rank {rank} yours\n"
