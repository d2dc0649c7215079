"""Find and end processes that others left behind. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

__all__ = [
    "adopt_orphans",
    "beyond_standard",
    "children",
    "crashed_children",
    "die_with_parent",
    "ignore_signals",
    "is_alive",
    "kill_marked",
    "marked",
    "state_of",
]

# Of linux/prctl.h: the standard library has no prctl(2).
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when ``parent``, its parent, ends; leave at once if it has already."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)
        # It may have ended before the call, and the kernel then sends nothing.
        if os.getppid() != parent:
            os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none of them is lost."""
    # A process inherits it where its parent ignores SIGCHLD, as some daemons do; then it could not wait for children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """The process ids of this process's children, whichever thread started them."""
    pids: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids += map(int, path.read_text().split())
    return pids


def state_of(pid: int) -> str:
    """A letter as in ``proc_pid_stat(5)``: ``S`` for a process that sleeps; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process has not ended; a zombie, for which its parent has not yet waited, has."""
    # An orphan's parent is init, which may take its time in a container.
    return state_of(pid) not in ("", "Z", "X")


def marked(mark: str) -> list[int]:
    """Every other process whose environment contains ``mark``, a text ``NAME=value``."""
    # Descendants inherit a variable, whatever their process group or session.
    variable, pids = mark.encode(), []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        pid = int(entry.parent.name)
        with contextlib.suppress(OSError):
            # It may have ended meanwhile, or belong to another user.
            if pid != os.getpid() and variable in entry.read_bytes().split(b"\0"):
                pids.append(pid)
    return pids


def crashed_children(parents: Collection[int]) -> dict[int, int]:
    """Children of these processes that have ended, not with status 0, and for which the parent has not yet waited.

    Returns:
        By process id, the exit status; minus the number of the signal that ended it.
    """
    crashed = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # the process has gone meanwhile
            continue
        # proc_pid_stat(5): the state is field 3, the parent 4, the status as waitpid(2) has it 52.
        if fields[0] == "Z" and int(fields[1]) in parents and (status := int(fields[49])):
            crashed[int(entry.parent.name)] = os.waitstatus_to_exitcode(status)
    return crashed


def kill_marked(mark: str) -> None:
    """Kill every process that :func:`marked` finds."""
    for pid in marked(mark):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def beyond_standard(descriptor: int) -> int:
    """A descriptor of the same file that is none of the three standard ones; ``descriptor`` itself is closed."""
    try:
        # Where standard streams are closed, a new file gets their numbers, and a child process would replace it by its
        # own standard streams.
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def ignore_signals() -> Iterator[None]:
    """Ignore SIGINT, SIGTERM and SIGHUP within the block, so that a second Ctrl-C does not interrupt the cleanup."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
