"""A child that leaves nothing behind: however this process ends, the child and whatever it started end too.

Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from pytest_trlcompat._processes import deaf, die_with_parent, kill_marked

__all__ = ["run", "stopped_like_ctrl_c", "undisturbed"]

_MARK = "TRLCOMPAT_RUN"
_GRACE = 1.2
"""Seconds between asking and killing. ``nox --parallel`` gives a session two seconds, so this must be less."""

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    output: IO[bytes] | None = None,
    timeout: float | None = None,
) -> int:
    """Run ``command`` to its end and return its exit status, negative for death by a signal.

    The child leads a process group of its own, so that Ctrl-C reaches it through here alone, once. On Ctrl-C, on
    SIGTERM (with which ``nox --parallel`` stops its sessions) and on SIGHUP it is asked to stop, then killed together
    with every descendant, also those in sessions of their own.

    Args:
        output: takes what the child prints, on both channels; by default it goes where ours goes.
        timeout: seconds after which the child is stopped.

    Raises:
        KeyboardInterrupt: after everything has ended.
        subprocess.TimeoutExpired: likewise.
    """
    mark = f"{_MARK}={uuid.uuid4().hex}"
    variables = {**env, _MARK: mark.partition("=")[2]}
    child = None
    with stopped_like_ctrl_c():
        try:
            with undisturbed():  # a child that nobody knows of yet could not be stopped
                child = subprocess.Popen(
                    list(command),
                    env=variables,
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,  # a group in the background that reads the terminal would be stopped
                    stdout=output,
                    stderr=output,
                    preexec_fn=_lead_a_group(os.getpid()),
                )
            return child.wait(timeout)
        finally:
            with deaf():
                if child is not None and child.poll() is None:
                    _stop(child)
                kill_marked(mark)


def _lead_a_group(parent: int) -> Callable[[], None]:
    def prepare() -> None:
        os.setpgid(0, 0)
        # For the one end that this process cannot answer: its own SIGKILL.
        die_with_parent(parent, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)

    return prepare


def _stop(child: subprocess.Popen[bytes]) -> None:
    _signal_group(child.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_GRACE)
    _signal_group(child.pid, signal.SIGKILL)
    child.wait()


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Within the block the signals that end a process wait; they are answered when it ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def stopped_like_ctrl_c() -> Iterator[None]:
    """Within the block, the signals that end a process orderly raise KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
