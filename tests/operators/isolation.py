"""Runs tasks in forked processes, so that a crash or a hang affects only one task.

Must not import torch: the caller has imported what its tasks need, and the processes inherit it.
"""

from __future__ import annotations

import contextlib
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
from pathlib import Path
from typing import Any, Generic, TypeVar

__all__ = ["Ended", "run_isolated"]

Task = TypeVar("Task")


@dataclass
class Ended(Generic[Task]):
    """A task that has ended, in whatever way."""

    task: Task
    reported: list[Any]
    """The values that it had reported until then."""
    failure: str | None
    """``killed by signal 11``, ``over 60 s``, the traceback of what it raised; None if it succeeded."""


@dataclass
class _Running(Generic[Task]):
    task: Task
    pid: int
    started: float
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
        work: yields the values that a task reports, for JSON. They are kept even if the process dies later.
        limit: seconds after which a process is killed; those that it waits for a core do not count.
        after_failure: returns tasks to run next because one has failed.
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
    sys.stdout.flush()  # or the child would print it again
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _run_task(task, work, writer)
    os.close(writer)
    now = time.monotonic()
    selector.register(reader, selectors.EVENT_READ, _Running(task, pid, now, now + limit))


def _run_task(task: Task, work: Callable[[Task], Iterable[Any]], writer: int) -> None:
    """Run in the forked process: never returns, and skips the parent's cleanup at exit."""
    try:
        with os.fdopen(writer, "w", buffering=1, encoding="utf-8") as output:
            try:
                for value in work(task):
                    output.write(f"{json.dumps({'reported': value})}\n")
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
        # A busy machine makes an operator late, and that is no fault of the operator.
        key.data.deadline = key.data.started + limit + _waited_for_a_core(key.data.pid)
        if key.data.deadline <= time.monotonic():
            _end(key, selector, kill=True)
            yield _ended(key.data, f"over {limit:g} s")


def _waited_for_a_core(pid: int) -> float:
    """Seconds for which the threads of a process could have run, had a core been free; 0 where the kernel does not say.

    Source: the second number of ``schedstat``, Documentation/scheduler/sched-stats.rst of Linux.
    """
    nanoseconds = 0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread has ended
            nanoseconds += int(thread.read_text().split()[1])
    return nanoseconds / 1e9


def _end(key: selectors.SelectorKey, selector: selectors.BaseSelector, *, kill: bool) -> int:
    if kill:
        os.kill(key.data.pid, signal.SIGKILL)
    selector.unregister(key.fd)
    os.close(key.fd)
    return os.waitpid(key.data.pid, 0)[1]


def _ended(running: _Running[Any], how: str) -> Ended[Any]:
    """``how`` it ended is used if it did not report that itself."""
    *lines, _unfinished = running.output.decode("utf-8", "replace").split("\n")
    values = [json.loads(line) for line in lines]
    said = [value["failure"] for value in values if "failure" in value]
    return Ended(running.task, [value["reported"] for value in values if "reported" in value], said[0] if said else how)
