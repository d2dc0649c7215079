"""Work in processes of its own, forked from this one, so that a crash or a hang costs one piece of work alone.

Must not import torch: whoever calls has imported what its work needs, and the processes inherit it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

__all__ = ["Ended", "run_isolated"]

Task = TypeVar("Task")


@dataclass
class Ended(Generic[Task]):
    """A piece of work that has ended, however it did."""

    task: Task
    told: list[Any]
    """What it had told until then."""
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
    work: Callable[[Task], Iterable[Any]],
    *,
    workers: int,
    limit: float,
    after_failure: Callable[[Ended[Task]], Iterable[Task]] = lambda ended: (),
) -> Iterator[Ended[Task]]:
    """Do ``work`` for each task in a forked process of its own, at most ``workers`` at a time.

    Args:
        work: gives what the task tells, values for JSON. They are kept when the process dies later.
        limit: seconds after which a process is killed.
        after_failure: asked for what is to be done because a task failed, which is then done next.
    """
    waiting = deque(tasks)
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or selector.get_map():
                while waiting and len(selector.get_map()) < workers:
                    _start(waiting.popleft(), work, limit, selector)
                for ended in _wait(selector, limit):
                    if ended.failure is not None:
                        waiting.extendleft(reversed(list(after_failure(ended))))
                    yield ended
        finally:
            for key in list(selector.get_map().values()):
                _end(key, selector, kill=True)


def _start(task: Task, work: Callable[[Task], Iterable[Any]], limit: float, selector: selectors.BaseSelector) -> None:
    sys.stdout.flush()  # or the child would have what is not written yet as well
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _tell(task, work, writer)
    os.close(writer)
    selector.register(reader, selectors.EVENT_READ, _Running(task, pid, time.monotonic() + limit))


def _tell(task: Task, work: Callable[[Task], Iterable[Any]], writer: int) -> None:
    """The forked process: never returns, and runs nothing of its parent's on its way out."""
    try:
        with os.fdopen(writer, "w", buffering=1, encoding="utf-8") as output:
            try:
                for value in work(task):
                    output.write(f"{json.dumps({'told': value})}\n")
                output.write(f"{json.dumps({'failure': None})}\n")
            except BaseException:
                output.write(f"{json.dumps({'failure': traceback.format_exc()})}\n")
    finally:
        os._exit(0)


def _wait(selector: selectors.BaseSelector, limit: float) -> Iterator[Ended[Any]]:
    first = min(key.data.deadline for key in selector.get_map().values())
    for key, _ in selector.select(max(0.0, first - time.monotonic())):
        read = os.read(key.fd, 1 << 16)
        if read:
            key.data.output += read
            continue
        status = os.waitstatus_to_exitcode(_end(key, selector, kill=False))
        yield _ended(key.data, f"killed by signal {-status}" if status < 0 else f"exit status {status}")
    for key in [key for key in selector.get_map().values() if key.data.deadline <= time.monotonic()]:
        _end(key, selector, kill=True)
        yield _ended(key.data, f"over {limit:g} s")


def _end(key: selectors.SelectorKey, selector: selectors.BaseSelector, *, kill: bool) -> int:
    if kill:
        os.kill(key.data.pid, signal.SIGKILL)
    selector.unregister(key.fd)
    os.close(key.fd)
    return os.waitpid(key.data.pid, 0)[1]


def _ended(running: _Running[Any], how: str) -> Ended[Any]:
    """``how`` it ended counts where it did not come to saying so itself."""
    *lines, _unfinished = running.output.decode("utf-8", "replace").split("\n")
    values = [json.loads(line) for line in lines]
    said = [value["failure"] for value in values if "failure" in value]
    return Ended(running.task, [value["told"] for value in values if "told" in value], said[0] if said else how)
