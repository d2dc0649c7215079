"""Runs a child process that leaves nothing behind: however this process ends, all its descendants end too."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pytest_trlcompat._processes import die_with_parent, ignore_signals, kill_marked

__all__ = ["Running", "deferred_signals", "end", "run", "signals_as_ctrl_c", "start", "started"]

_MARK = "TRLCOMPAT_RUN"
_GRACE = 1.2
"""Seconds between SIGINT and SIGKILL. ``nox --parallel`` gives a session two seconds, so this must be less."""

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    output: IO[bytes] | None = None,
    timeout: float | None = None,
    grace: float = _GRACE,
) -> int:
    """Run ``command`` to its end and return its exit status, negative for death by a signal.

    On Ctrl-C, SIGTERM (which
    ``nox --parallel`` sends to its sessions) and SIGHUP it gets SIGINT, and is then killed together with all its
    descendants, including those in other process sessions.

    Args:
        output: a file for the child's standard output and error; by default it inherits ours.
        timeout: seconds after which the child is stopped.
        grace: seconds between SIGINT and SIGKILL.

    Raises:
        KeyboardInterrupt: after all descendants have ended.
        subprocess.TimeoutExpired: after all descendants have ended.
    """
    with started(command, env=env, cwd=cwd, output=output, grace=grace) as child:
        return child.wait(timeout)


@contextlib.contextmanager
def started(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    output: IO[bytes] | None = None,
    grace: float = _GRACE,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``command`` as :func:`run` does, for the block; at its end the child has ended, with all its descendants.

    Raises:
        KeyboardInterrupt: on a signal within the block, after all descendants have ended.
    """
    running = None
    with signals_as_ctrl_c():
        try:
            # A child that is not assigned yet could not be stopped.
            with deferred_signals():
                running = start(command, env=env, cwd=cwd, output=output)
            yield running.child
        finally:
            if running is not None:
                end([running], grace)


@dataclass(frozen=True)
class Running:
    """A child that leads its own process group.

    Attributes:
        mark: ``NAME=value`` of the environment of all its descendants.
    """

    child: subprocess.Popen[bytes]
    mark: str


def start(command: Sequence[str], *, env: Mapping[str, str], cwd: Path, output: IO[bytes] | None = None) -> Running:
    """Start one of several children as :func:`run` does; whoever calls this calls :func:`end`, whatever happens."""
    mark = uuid.uuid4().hex
    child = subprocess.Popen(
        list(command),
        env={**env, _MARK: mark},
        cwd=cwd,
        # The kernel would stop a background group that reads the terminal.
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        preexec_fn=_lead_a_group(os.getpid()),
    )
    return Running(child, f"{_MARK}={mark}")


def end(running: Sequence[Running], grace: float = _GRACE) -> None:
    """End children with all their descendants, all at the same time.

    Args:
        grace: seconds between SIGINT and SIGKILL.
    """
    with ignore_signals():
        alive = [each.child for each in running if each.child.poll() is None]
        for child in alive:
            _signal_group(child.pid, signal.SIGINT)
        deadline = time.monotonic() + grace
        for child in alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(deadline - time.monotonic(), 0.0))
        for child in alive:
            # Also where the child itself has ended by now: others of its group may be left.
            _signal_group(child.pid, signal.SIGKILL)
            child.wait()
        # Descendants in process groups of their own are known by the variable that they have inherited.
        for each in running:
            kill_marked(each.mark)


def _lead_a_group(parent: int) -> Callable[[], None]:
    def prepare() -> None:
        # A group of its own, so that it gets Ctrl-C only from here, and once.
        os.setpgid(0, 0)
        # In case this process is killed by SIGKILL, which it cannot handle.
        die_with_parent(parent, signal.SIGTERM)
        # The mask of deferred_signals() is inherited; with it the child could not be interrupted.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)

    return prepare


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Defer signals that end a process until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt within the block on SIGTERM and SIGHUP, as on Ctrl-C."""
    # Python sets handlers of signals in the main thread alone.
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
