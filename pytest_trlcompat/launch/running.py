"""Runs a program in a rank as an interpreter of its own would: ``__main__``, ``sys.argv``, exit status, exit handlers.

Imports only the standard library, and the stack by what the program does.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_trlcompat.launch import nested
from pytest_trlcompat.launch.program import Program

__all__ = ["ExitStatusError", "Run"]


class ExitStatusError(RuntimeError):
    """A command ended with another exit status than 0; what it printed says why.

    Attributes:
        status: as :func:`sys.exit` got it, as a number.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message, status)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Run:
    """What a launch calls in every rank; shown as the command."""

    program: Program

    def __repr__(self) -> str:
        return repr(self.program)

    def __call__(self) -> int:
        """Run the program to its end: its threads that are no daemons have ended, its exit handlers have run.

        Where it starts a launcher of ranks, this rank becomes one of those; see :mod:`pytest_trlcompat.launch.nested`.

        Returns:
            0.

        Raises:
            ExitStatusError: it ended by another exit status.
            NestedLauncherError: it starts ranks that are not this launch's, or another program of Python's.
            BaseException: whatever it raised.
        """
        with _exit_handlers():
            status = _run(self.program)
        if status:
            raise ExitStatusError(f"{self!r} ended with exit status {status}", status)
        return status


def _run(program: Program) -> int:
    while True:
        try:
            with nested.replaced(program):
                return _execute(program)
        except nested.Becomes as other:
            program = replace(other.program, words=program.words, strategy=program.strategy, follow=program.follow)


def _execute(program: Program) -> int:
    os.chdir(program.folder)
    local = [f"--local_rank={os.environ.get('LOCAL_RANK', '0')}"] if program.gets_local_rank else []
    sys.argv = [program.target, *local, *program.arguments]
    try:
        if program.is_module:
            sys.path.insert(0, program.folder)
            # The server may have imported it, which a new interpreter has not: runpy would warn of that.
            sys.modules.pop(program.target, None)
            runpy.run_module(program.target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(program.target).resolve().parent))
            runpy.run_path(program.target, run_name="__main__")
    except SystemExit as ended:
        return _status(ended.code)
    return 0


def _status(code: Any) -> int:
    """The exit status that an interpreter makes of what ``sys.exit`` was given."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _end_pools() -> None:
    """What an interpreter does before it waits for threads: those of ``concurrent.futures`` would wait for work.

    It has no public name; https://github.com/python/cpython/blob/3.11/Lib/threading.py, ``_shutdown``.
    """
    for end in reversed(getattr(threading, "_threading_atexits", [])):
        end()


@contextlib.contextmanager
def _exit_handlers() -> Iterator[None]:
    """Wait at the end for threads, and run what was registered meanwhile, the last first; a rank ends without both.

    Handlers that the server inherited are not the program's, and stay as they are.
    """
    handlers: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
    register, unregister = atexit.register, atexit.unregister

    def record(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        handlers.append((function, args, kwargs))
        return function

    def forget(function: Callable[..., Any]) -> None:
        handlers[:] = [each for each in handlers if each[0] != function]
        unregister(function)

    atexit.register, atexit.unregister = record, forget  # type: ignore[assignment]
    try:
        yield
    finally:
        _end_pools()
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit.register, atexit.unregister = register, unregister
        for function, args, kwargs in reversed(handlers):
            try:
                function(*args, **kwargs)
            except Exception:  # an interpreter shows it, and goes on
                traceback.print_exc()
