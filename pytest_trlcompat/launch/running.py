"""Runs a program in a rank as an interpreter of its own would: ``__main__``, ``sys.argv``, exit status, exit handlers.

Imports only the standard library, and the stack by what the program does.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import subprocess
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from pytest_trlcompat.launch import nested
from pytest_trlcompat.launch.program import Program

__all__ = ["ExitStatusError", "Run"]

_INHERITED = frozenset(sys.modules)
"""What was there before the first program, which the server or the interpreter imported."""


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
        """Run the program to its end: until its non-daemon threads have ended and its exit handlers have run.

        If the program starts a launcher of ranks, this rank runs what those ranks would run, within the call that
        starts the launcher; see :mod:`pytest_trlcompat.launch.nested`.

        Returns:
            0.

        Raises:
            ExitStatusError: it ended by another exit status.
            NestedLauncherError: it starts ranks that are not this launch's, or another program of Python's.
            BaseException: whatever it raised.
        """
        failed: list[Exception] = []
        starts = nested.Starts(self.program, lambda inner: _run_inner(starts, inner, failed))
        try:
            with _fresh_path(self.program), nested.replaced(starts), _exit_handlers():
                starts.path = tuple(sys.path)
                status = _execute(self.program, starts)
        except subprocess.CalledProcessError as error:
            _raise_refused(starts)
            if failed:  # what ended the program that it started says more
                raise failed[-1] from error
            raise
        _raise_refused(starts)
        if status and failed:
            raise failed[-1]
        if status:
            raise ExitStatusError(f"{self!r} ended with exit status {status}", status)
        return status


@contextlib.contextmanager
def _fresh_path(program: Program) -> Iterator[None]:
    """Within the block, ``sys.path`` as a new interpreter has it, which the test process may have added to.

    Modules that the server has imported from what was added are forgotten.
    """
    before = list(sys.path)
    added = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    ours = [entry for entry in before if entry not in program.test_path]  # of the software accelerator
    fresh = [*ours, *(os.path.abspath(entry) for entry in added), *program.interpreter_path]
    beneath = tuple(os.path.join(entry, "") for entry in before if entry and entry not in fresh)
    reachable = tuple(os.path.join(entry, "") for entry in fresh)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        is_ours = name == "__main__" or name.partition(".")[0] == __name__.partition(".")[0]
        if not is_ours and isinstance(file, str) and file.startswith(beneath) and not file.startswith(reachable):
            del sys.modules[name]
    sys.path[:] = fresh
    try:
        yield
    finally:
        sys.path[:] = before


def _raise_refused(starts: nested.Starts) -> None:
    """Raises: NestedLauncherError, where a program has handled the error that should have ended it."""
    if starts.refused is not None:
        raise starts.refused
    if starts.replaced is not None:
        raise nested.NestedLauncherError(
            f"{starts.running!r} went on after os.exec*, which never returns: it handles BaseException around it, by a "
            "bare except. Let it handle OSError there"
        )


def _run_inner(starts: nested.Starts, inner: Program, failed: list[Exception]) -> int:
    """Run a program within another, as an interpreter of its own would, and give the other back what it had.

    Modules of the stack stay imported, with their state; those of the user's that the other has imported are put aside.
    """
    outer = starts.running
    before = os.getcwd(), sys.argv, list(sys.path), sys.modules["__main__"]
    aside = _users_modules(starts.path)
    for name in aside:
        del sys.modules[name]
    starts.running = replace(inner, words=outer.words, strategy=outer.strategy, follow=outer.follow)
    try:
        added = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        sys.path[:] = [*(entry for entry in added if entry not in starts.path), *starts.path]
        with _exit_handlers(nested=True):
            return _execute(starts.running, starts)
    except Exception as error:  # an interpreter shows it, and ends with 1
        traceback.print_exc()
        failed.append(error)
        return 1
    finally:
        starts.running = outer
        # First those that the inner program has imported, so that the outer one's of the same names come back.
        for name in _users_modules(starts.path):
            del sys.modules[name]
        sys.modules.update(aside)
        folder, sys.argv, sys.path[:], sys.modules["__main__"] = before
        os.chdir(folder)


def _is_beneath(file: str, folders: tuple[str, ...], installed: tuple[str, ...]) -> bool:
    # Compiled modules are none of them: no process can import one twice.
    return file.endswith(".py") and file.startswith(folders) and not file.startswith(installed)


def _users_modules(path: Sequence[str]) -> dict[str, ModuleType]:
    """Modules from folders that a program has on its path beside those of the launch, ``path``; not compiled ones."""
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    folders = tuple(os.path.join(os.path.abspath(entry), "") for entry in sys.path if entry not in path)
    modules = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        is_ours = name in _INHERITED or name.partition(".")[0] == __name__.partition(".")[0]
        if not is_ours and isinstance(file, str) and _is_beneath(file, folders, installed):
            modules[name] = module
    modules.pop("__main__", None)
    return modules


def _execute(program: Program, starts: nested.Starts) -> int:
    os.chdir(program.folder)
    local = [f"--local_rank={os.environ.get('LOCAL_RANK', '0')}"] if program.gets_local_rank else []
    sys.argv = [program.target, *local, *program.arguments]
    try:
        if program.is_module:
            sys.path.insert(0, program.folder)
            # The server may have imported it, which a new interpreter has not: runpy would warn of that.
            sys.modules.pop(program.target, None)
            # alter_sys makes it sys.modules["__main__"], where pickle looks for its classes, as run_path always does.
            runpy.run_module(program.target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(program.target).resolve().parent))
            runpy.run_path(program.target, run_name="__main__")
    except SystemExit as ended:
        return _status(ended.code)
    except nested.Replaced as other:
        starts.replaced = None
        return other.status
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
    """End the pools of ``concurrent.futures`` as an interpreter does at its end: their threads would wait for work.

    It has no public name; https://github.com/python/cpython/blob/3.11/Lib/threading.py, ``_shutdown``.
    """
    for end in reversed(getattr(threading, "_threading_atexits", [])):
        end()


@contextlib.contextmanager
def _exit_handlers(nested: bool = False) -> Iterator[None]:
    """Wait at the end for threads, and run what was registered meanwhile, the last first; a rank ends without both.

    Handlers that the server inherited are not the program's, and stay as they are.
    """
    handlers: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
    register, unregister = atexit.register, atexit.unregister

    def record(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        handlers.append((function, args, kwargs))
        return function

    def forget(function: Callable[..., Any]) -> None:
        handlers[:] = [handler for handler in handlers if handler[0] != function]
        unregister(function)

    before = set(threading.enumerate()) if nested else set()
    # Where a library has imported register by its name, its handlers do not run: a rank ends without them.
    atexit.register, atexit.unregister = record, forget  # type: ignore[assignment]
    try:
        yield
    finally:
        if not nested:  # a pool of the outer program's must go on
            _end_pools()
        for thread in set(threading.enumerate()) - before:
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit.register, atexit.unregister = register, unregister
        for function, args, kwargs in reversed(handlers):
            try:
                function(*args, **kwargs)
            except Exception:  # an interpreter shows it, and goes on
                traceback.print_exc()
