"""Forks the ranks of one launch and stays with them until the last has ended, in bounded time, whatever they do.

Runs in the warm server. Single-threaded while it forks. Imports torch only for the rendezvous store.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import IO, Any

from pytest_trlcompat.launch import protocol, rank

__all__ = ["Cancelled", "launch"]

# After the first failure the other ranks get this long to notice it by themselves, so that their own errors are seen.
_GRACE = 5.0
_DUMP_TIME = 0.5
_POLL = 0.05
_OUTPUT_HEAD, _OUTPUT_TAIL = 1 << 16, 1 << 18


class Cancelled(Exception):
    """The test process is gone, or no longer waits for this launch."""


@dataclass
class _Child:
    rank: int
    pid: int
    pidfd: int
    channel: socket.socket
    stdout: IO[bytes]
    stderr: IO[bytes]
    started: float
    buffer: protocol.Buffer = field(default_factory=protocol.Buffer)
    message: dict[str, Any] | None = None
    status: int | None = None
    peak_bytes: int = 0
    ended_at: float = 0.0
    ended_by_launcher: str | None = None

    @property
    def failed(self) -> bool:
        return self.status is not None and (self.status != 0 or self.message is None)

    def end(self, reason: str) -> None:
        if self.status is None:
            self.ended_by_launcher = self.ended_by_launcher or reason
            _kill_group(self.pid)


def launch(spec: Mapping[str, Any], client: socket.socket) -> dict[str, Any]:
    """Run ``spec["world_size"]`` ranks.

    Returns:
        ``{"ranks": [...], "timed_out": bool, "seconds": s}``, plain data for the client.

    Raises:
        Cancelled: the client closed its side; every rank has been ended by then.
    """
    started = time.monotonic()
    with _rendezvous(spec) as serve, contextlib.ExitStack() as stack:
        children = _fork_all(spec, client, stack)
        try:
            serve()
            timed_out = _supervise(children, client, spec["timeout"])
        finally:
            for child in children:
                child.end("the launch was cancelled")
                _reap(child, wait=True)
        return {
            "ranks": [_report(child) for child in children],
            "timed_out": timed_out,
            "seconds": time.monotonic() - started,
        }


@contextlib.contextmanager
def _rendezvous(spec: Mapping[str, Any]) -> Iterator[Callable[[], None]]:
    """A store that the ranks meet at: on loopback only, on a port that the system chose and nobody can take away.

    The socket is bound before the fork, so that the ranks know the port; the store's thread starts after it, so that
    no thread is forked. It outlives every rank: one that is done early takes nothing from the others.
    """
    if spec["strategy"] == "single":
        yield lambda: None
        return
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    stores = []

    def serve() -> None:
        from torch.distributed import TCPStore

        stores.append(
            TCPStore(
                "127.0.0.1",
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=spec["timeout"]),
                master_listen_fd=listener.detach(),
            )
        )

    try:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        for variables in spec["rank_environment"]:
            variables["MASTER_ADDR"], variables["MASTER_PORT"] = "127.0.0.1", str(port)
        yield serve
    finally:
        stores.clear()
        listener.close()


def _fork_all(spec: Mapping[str, Any], client: socket.socket, stack: contextlib.ExitStack) -> list[_Child]:
    children: list[_Child] = []
    for number in range(spec["world_size"]):
        ours, theirs = socket.socketpair()
        stack.callback(ours.close)
        stdout = _output_file(stack)
        stderr = _output_file(stack)
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            # The rank must hold no end of anybody else's connection, or nobody would see it close.
            client.close()
            for inherited in (ours, *(child.channel for child in children)):
                inherited.close()
            rank.run(spec, number, theirs, stdout.fileno(), stderr.fileno())
        theirs.close()
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # the rank does the same; whoever is first
        ours.setblocking(False)
        pidfd = os.pidfd_open(pid)
        stack.callback(os.close, pidfd)
        children.append(_Child(number, pid, pidfd, ours, stdout, stderr, started))
    return children


def _output_file(stack: contextlib.ExitStack) -> IO[bytes]:
    """A file without a name: it is gone with its last descriptor, whoever dies first."""
    return stack.enter_context(tempfile.TemporaryFile())


def _supervise(children: list[_Child], client: socket.socket, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    failed_at: float | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(client, selectors.EVENT_READ)
        for child in children:
            selector.register(child.channel, selectors.EVENT_READ, child)
            selector.register(child.pidfd, selectors.EVENT_READ, child)
        while any(child.status is None for child in children):
            for key, _ in selector.select(_POLL):
                if key.fileobj is client:
                    raise Cancelled
                if not _attend(key.data, key.fileobj):
                    selector.unregister(key.fileobj)
            now = time.monotonic()
            if failed_at is None and any(child.failed for child in children):
                failed_at = now
            if failed_at is not None and now > failed_at + _GRACE:
                first = min((child for child in children if child.failed), key=lambda child: child.ended_at)
                for child in children:
                    child.end(f"rank {first.rank} had failed and this one did not end by itself")
            if now > deadline:
                _dump_stacks(children)
                for child in children:
                    child.end(f"the launch's timeout of {timeout:g} s passed")
                return True
    return False


def _attend(child: _Child, source: Any) -> bool:
    """Take what a rank sent, or its exit; ``False`` when this source will say nothing more."""
    if source is child.channel:
        return _drain(child)
    _reap(child, wait=False)
    return child.status is None


def _drain(child: _Child) -> bool:
    """Take all that the rank has sent so far; ``False`` when its side is closed."""
    while True:
        try:
            data = child.channel.recv(1 << 20)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        for message in child.buffer.feed(data):
            child.message = message


def _reap(child: _Child, wait: bool) -> None:
    if child.status is not None:
        return
    # The exited rank is still a zombie here, so its group cannot be anybody else's: end what it left behind.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG))
    _kill_group(child.pid)
    _, status, usage = os.wait4(child.pid, 0)
    child.status = os.waitstatus_to_exitcode(status)
    child.peak_bytes = usage.ru_maxrss * 1024
    child.ended_at = time.monotonic()
    _drain(child)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _dump_stacks(children: list[_Child]) -> None:
    for child in children:
        if child.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, rank.STACK_DUMP_SIGNAL)
    time.sleep(_DUMP_TIME)


def _report(child: _Child) -> dict[str, Any]:
    message = child.message or {}
    ended = message.get("at", child.ended_at)
    return {
        "rank": child.rank,
        "returned": message.get("kind") == "returned",
        "value": message.get("value"),
        "failure": message.get("failure"),
        "proof": message.get("proof", {}),
        "exit_status": child.status,
        "ended_by_launcher": child.ended_by_launcher,
        "stdout": _text(child.stdout),
        "stderr": _text(child.stderr),
        "seconds": ended - child.started,
        "ended_at": ended,
        "peak_bytes": child.peak_bytes,
    }


def _text(stream: IO[bytes]) -> str:
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    if size <= _OUTPUT_HEAD + _OUTPUT_TAIL:
        return stream.read().decode(errors="replace")
    head = stream.read(_OUTPUT_HEAD).decode(errors="replace")
    stream.seek(size - _OUTPUT_TAIL)
    left_out = size - _OUTPUT_HEAD - _OUTPUT_TAIL
    return f"{head}\n[... {left_out} bytes left out ...]\n{stream.read().decode(errors='replace')}"
