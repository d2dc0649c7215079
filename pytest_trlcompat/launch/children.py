"""Forks ranks, receives their outcomes, ends them and their descendants, and reports how they ended.

Runs in the warm server, which is single-threaded while it forks, and in the keeper of each cold rank.
"""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import select
import selectors
import signal
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pytest_trlcompat import _processes
from pytest_trlcompat.launch import protocol, rank
from pytest_trlcompat.launch.limits import explain
from pytest_trlcompat.launch.live import file_of
from pytest_trlcompat.launch.messages import LaunchReport, LaunchSpec, RankOutcome, RankReport
from pytest_trlcompat.launch.rendezvous import rendezvous, store_process
from pytest_trlcompat.launch.supervise import supervise

__all__ = [
    "Cancelled",
    "Child",
    "Refused",
    "attend",
    "dump_stacks",
    "end_orphans",
    "fork_rank",
    "launch",
    "output_files",
    "reap",
    "report",
]

_DUMP_TIME = 0.5
_EXIT_TIME = 1.0
"""Seconds that a rank gets to exit that has nothing else to do."""
_SHARED_MEMORY = Path("/dev/shm")
# Bytes of a rank's output that a report keeps: how it began, and more of how it ended.
_OUTPUT_HEAD, _OUTPUT_TAIL = 1 << 16, 1 << 18


class Cancelled(Exception):
    """The test process has ended, or no longer waits for this launch."""


class Refused(Exception):
    """The system refused something that a launch needs; all that had begun of it has been ended."""


@dataclass
class Child:
    """A rank, in the process that forked it."""

    rank: int
    pid: int
    pidfd: int
    channel: socket.socket
    stdout: IO[bytes]
    stderr: IO[bytes]
    started: float
    buffer: protocol.Buffer = field(default_factory=protocol.Buffer)
    outcome: RankOutcome | None = None
    status: int | None = None
    peak_bytes: int = 0
    ended_at: float = 0.0
    ended_by_launcher: str | None = None

    @property
    def failed(self) -> bool:
        return self.status is not None and (self.status != 0 or self.outcome is None)

    @property
    def returned(self) -> bool:
        return self.outcome is not None and self.outcome.returned

    def release(self) -> None:
        """Let a rank that has returned exit; see ``rank.run``."""
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_WR)

    def end(self, reason: str) -> None:
        if self.status is None and self.returned:  # it only waits, and need not be killed
            self.release()
            exited = select.poll()
            exited.register(self.pidfd, select.POLLIN)
            if exited.poll(_EXIT_TIME * 1000):
                reap(self, wait=False)
        if self.status is None:
            stopped = "; it was stopped by a signal" if _is_stopped(self.pid) else ""
            self.ended_by_launcher = self.ended_by_launcher or f"{reason}{stopped}"
            _kill(self.pid)


class _Children:
    """The ranks of a warm launch, and the client that waits for them."""

    def __init__(self, children: Sequence[Child], client: socket.socket, stack: contextlib.ExitStack) -> None:
        self._children, self._client = children, client
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._selector.register(client, selectors.EVENT_READ)
        for child in children:
            self._selector.register(child.channel, selectors.EVENT_READ, child)
            self._selector.register(child.pidfd, selectors.EVENT_READ, child)

    def running(self) -> bool:
        return any(child.status is None for child in self._children)

    def listen(self, limit: float) -> None:
        for key, _ in self._selector.select(limit):
            # While a launch runs, the client says nothing: that it can be read means that it has gone.
            if key.fileobj is self._client:
                raise Cancelled
            if not attend(key.data, key.fileobj):
                self._selector.unregister(key.fileobj)
        if all(child.outcome is not None or child.status is not None for child in self._children):
            for child in self._children:
                child.release()

    def first_failed(self) -> int | None:
        failed = [child for child in self._children if child.failed]
        return min(failed, key=lambda child: child.ended_at).rank if failed else None

    def dump_stacks(self) -> None:
        dump_stacks(self._children)

    def end(self, reason: str) -> None:
        for child in self._children:
            child.end(reason)


def launch(spec: LaunchSpec, client: socket.socket) -> LaunchReport:
    """Run the ranks of this machine.

    Raises:
        Cancelled: the client closed its connection; all ranks have been ended.
        Refused: a rank could not be started; those that had been are ended.
    """
    started = time.monotonic()
    try:
        with rendezvous(spec) as (spec, serve), contextlib.ExitStack() as stack:
            children: list[Child] = []
            try:
                for number in range(spec.local_world_size):
                    children.append(_fork_next(spec, number, children, client, stack))
                _start_store(serve)
                timed_out = supervise(_Children(children, client, stack), spec.timeout, spec.debugged)
            finally:
                for child in children:
                    # Those that have ended are past it; others still run only where the launch failed or was cancelled.
                    child.end("the launch was cancelled")
                    reap(child, wait=True)
                # Tried again below, when the launch's descriptors are free.
                with contextlib.suppress(OSError):
                    end_orphans()
            return LaunchReport(tuple(report(child) for child in children), timed_out, time.monotonic() - started)
    except OSError as error:
        raise Refused(explain(error)) from error
    finally:
        end_orphans()


def _start_store(serve: Callable[[], None]) -> None:
    try:
        serve()
    except Exception as error:  # torch has classes of its own for what the system refuses
        raise Refused(f"the ranks' store could not be started: {type(error).__name__}: {error}") from error


def _fork_next(
    spec: LaunchSpec, number: int, before: Sequence[Child], client: socket.socket, stack: contextlib.ExitStack
) -> Child:
    others = [client, *(child.channel for child in before)]
    try:
        return fork_rank(spec, number, others, output_files(spec, number, stack), stack)
    except OSError as error:
        raise Refused(f"rank {number} of {spec.local_world_size} could not be started: {explain(error)}") from error


def fork_rank(
    spec: LaunchSpec,
    number: int,
    others: Sequence[socket.socket],
    output: tuple[IO[bytes], IO[bytes]],
    stack: contextlib.ExitStack,
) -> Child:
    """Fork one rank, which leads its own process group.

    Args:
        number: the rank's number on this machine.
        others: connections of the parent that the rank must close, so that only the parent keeps them open.
        output: files for its stdout and stderr.
        stack: releases this process's resources for it.

    Raises:
        OSError: the system refused a process or a descriptor; there is then no rank.
    """
    ours, theirs = socket.socketpair()
    stack.callback(ours.close)
    semaphores = f"trlcompat-{uuid.uuid4().hex}"
    started = time.monotonic()
    parent = os.getpid()
    # Closed here after the fork, so that the connection ends when the rank does.
    with theirs:
        pid = os.fork()
        if pid == 0:
            try:
                for inherited in (ours, *others):
                    inherited.close()
                _name_semaphores(semaphores)
                rank.run(spec, number, theirs, parent, (output[0].fileno(), output[1].fileno()))
            finally:
                os._exit(1)
    stack.callback(_remove_semaphores, semaphores)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # the rank does the same; either may be first
    # For _drain, which reads until nothing is left.
    ours.setblocking(False)
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        _kill(pid)
        os.waitpid(pid, 0)
        raise
    stack.callback(os.close, pidfd)
    return Child(number, pid, pidfd, ours, *output, started)


def _name_semaphores(prefix: str) -> None:
    """Give the semaphores of ``multiprocessing`` in this process and its children a known prefix.

    If ``multiprocessing`` does not fork (importing DeepSpeed 0.17.1 has that effect), a semaphore exists until somebody
    removes it. A rank that is killed, or that exits without the interpreter's shutdown, does not remove its own.
    """
    multiprocessing.process.current_process()._config["semprefix"] = f"/{prefix}"  # type: ignore[attr-defined]


def _remove_semaphores(prefix: str) -> None:
    for path in _SHARED_MEMORY.glob(f"sem.{prefix}-*"):
        # Every user sees the names there, and may add one; it is theirs, and ends no launch.
        with contextlib.suppress(PermissionError):
            path.unlink(missing_ok=True)


def end_orphans() -> None:
    """Kill processes that the ranks of a launch left behind in other process groups or sessions.

    Once their parents have ended they are children of this process (see :func:`_processes.adopt_orphans`).
    """
    spared = store_process()
    while orphans := [pid for pid in _processes.children() if pid not in spared]:
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def output_files(spec: LaunchSpec, number: int, stack: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Files for a rank's stdout and stderr: without a name, which the kernel removes with their last descriptor, or
    where the test process follows them.
    """

    def new(stream: str) -> IO[bytes]:
        if spec.output_folder is None:
            # In the launcher's present folder: that with which the server started may have vanished.
            return stack.enter_context(tempfile.TemporaryFile(dir=spec.folder))
        return stack.enter_context(file_of(spec.output_folder, number, stream).open("w+b"))

    return new("stdout"), new("stderr")


def attend(child: Child, source: Any) -> bool:
    """Read what a rank sent, or its exit status; ``False`` when ``source`` is exhausted."""
    if source is child.channel:
        return _drain(child)
    reap(child, wait=False)
    return child.status is None


def _drain(child: Child) -> bool:
    """Read all that the rank has sent so far; ``False`` when it has closed the connection."""
    while True:
        try:
            data = child.channel.recv(1 << 20)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        try:
            for outcome in child.buffer.feed(data):
                child.outcome = outcome
        except Exception:  # the rank's function has written into the connection
            child.outcome = None
            child.release()  # what it says can no longer be known
            return False


def reap(child: Child, wait: bool) -> None:
    if child.status is not None:
        return
    # The rank is still a zombie here, so its group id cannot be reused: end the processes that it left behind.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG))
    _kill(child.pid)
    _, status, usage = os.wait4(child.pid, 0)
    child.status = os.waitstatus_to_exitcode(status)
    # Linux counts ru_maxrss in KiB.
    child.peak_bytes = usage.ru_maxrss * 1024
    child.ended_at = time.monotonic()
    # What it has sent just before it ended.
    _drain(child)


def _is_stopped(pid: int) -> bool:
    """Whether SIGSTOP, or another signal like it, has stopped the process; see ``proc_pid_stat(5)``."""
    try:
        return _processes.state_of(pid) in ("T", "t")
    except OSError:  # descriptors have run out, say
        return False


def _kill(pid: int) -> None:
    """Kill a rank, which may have left its process group, and that group."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def dump_stacks(children: Sequence[Child]) -> None:
    """Have every running rank print the stacks of its threads to its stderr."""
    for child in children:
        if child.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, rank.STACK_DUMP_SIGNAL)
    # Time to write them: nothing tells when the last one is complete.
    time.sleep(_DUMP_TIME)


def report(child: Child) -> RankReport:
    """How a rank ended."""
    assert child.status is not None
    ended = child.ended_at if child.outcome is None else child.outcome.ended_at
    return RankReport(
        rank=child.rank,
        exit_status=child.status,
        outcome=child.outcome,
        ended_by_launcher=child.ended_by_launcher,
        stdout=_text(child.stdout),
        stderr=_text(child.stderr),
        seconds=ended - child.started,
        ended_at=ended,
        peak_bytes=child.peak_bytes,
    )


def _text(stream: IO[bytes]) -> str:
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    if size <= _OUTPUT_HEAD + _OUTPUT_TAIL:
        return stream.read().decode(errors="replace")
    head = stream.read(_OUTPUT_HEAD).decode(errors="replace")
    stream.seek(size - _OUTPUT_TAIL)
    left_out = size - _OUTPUT_HEAD - _OUTPUT_TAIL
    return f"{head}\n[... {left_out} bytes left out ...]\n{stream.read().decode(errors='replace')}"
