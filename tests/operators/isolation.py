"""Work in processes of its own, forked from this one, so that a crash or a hang costs one piece of work alone.

Must not import torch: whoever calls has imported what its work needs, and the processes inherit it.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["Ended", "run_isolated"]

Task = TypeVar("Task")


@dataclass
class Ended(Generic[Task]):
    """A piece of work that has ended, however it did."""

    task: Task
    lines: list[str]
    """What it had told until then; a line that it had not finished is not among them."""
    failure: str | None
    """``killed by signal 11``, ``over 60 s``, the traceback of what it raised; None when it ended well."""


@dataclass
class _Running(Generic[Task]):
    task: Task
    pid: int
    deadline: float
    output: bytearray = field(default_factory=bytearray)


def run_isolated(
    tasks: Iterable[Task],
    work: Callable[[Task], Iterable[str]],
    *,
    workers: int,
    limit: float,
    again: Callable[[Ended[Task]], Task | None] = lambda ended: None,
) -> Iterator[Ended[Task]]:
    """Do ``work`` for each task in a forked process of its own, at most ``workers`` at a time.

    Args:
        work: gives the lines that the task tells, each without a line break. They are kept when the process dies later.
        limit: seconds after which a process is killed.
        again: asked for what remains to be done of a task that failed, which is then done next.
    """
    waiting = deque(tasks)
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or selector.get_map():
                while waiting and len(selector.get_map()) < workers:
                    _start(waiting.popleft(), work, limit, selector)
                for ended in _wait(selector, limit):
                    rest = again(ended) if ended.failure else None
                    if rest is not None:
                        waiting.appendleft(rest)
                    yield ended
        finally:
            for key in list(selector.get_map().values()):
                _end(key, selector, kill=True)


def _start(
    task: Task, work: Callable[[Task], Iterable[str]], limit: float, selector: selectors.BaseSelector
) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _tell(task, work, writer)
    os.close(writer)
    selector.register(reader, selectors.EVENT_READ, _Running(task, pid, time.monotonic() + limit))


def _tell(task: Task, work: Callable[[Task], Iterable[str]], writer: int) -> None:
    """The forked process: never returns, and runs nothing of its parent's on its way out."""
    status = 1
    try:
        with os.fdopen(writer, "w", buffering=1, encoding="utf-8") as output:
            try:
                for line in work(task):
                    output.write(f"{line}\n")
                status = 0
            except BaseException:
                output.write(f"!{traceback.format_exc()!r}\n")
    finally:
        os._exit(status)


def _wait(selector: selectors.BaseSelector, limit: float) -> Iterator[Ended[Task]]:
    first = min(key.data.deadline for key in selector.get_map().values())
    for key, _ in selector.select(max(0.0, first - time.monotonic())):
        read = os.read(key.fd, 1 << 16)
        if read:
            key.data.output += read
            continue
        status = os.waitstatus_to_exitcode(_end(key, selector, kill=False))
        yield _ended(key.data, f"killed by signal {-status}" if status < 0 else None)
    for key in [key for key in selector.get_map().values() if key.data.deadline <= time.monotonic()]:
        _end(key, selector, kill=True)
        yield _ended(key.data, f"over {limit:g} s")


def _end(key: selectors.SelectorKey, selector: selectors.BaseSelector, *, kill: bool) -> int:
    if kill:
        os.kill(key.data.pid, signal.SIGKILL)
    selector.unregister(key.fd)
    os.close(key.fd)
    return os.waitpid(key.data.pid, 0)[1]


def _ended(running: _Running[Task], failure: str | None) -> Ended[Task]:
    *lines, _unfinished = running.output.decode("utf-8", "replace").split("\n")
    if lines and lines[-1].startswith("!"):
        failure = lines.pop()[1:]
    return Ended(running.task, lines, failure)
