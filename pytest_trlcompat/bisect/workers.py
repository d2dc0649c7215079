"""Workers: examine several candidates at a time, each in a forked process of its own, and stop those not needed.

Imports only the standard library and the matrix.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import uuid
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, Generic, Protocol, TypeVar

from pytest_trlcompat import _processes
from pytest_trlcompat.matrix import process

__all__ = ["MARK", "Forked", "Here", "WorkerDied", "Workers"]

Key = TypeVar("Key", bound=Hashable)
MARK = "_TRLCOMPAT_WORKER"
"""A variable by which what a worker started is known, and is killed with it. What must not be, is started without."""


class WorkerDied(RuntimeError):
    """A worker ended without a result."""


class Workers(Protocol[Key]):
    """Runs functions, and hands over their results as they come."""

    def running(self) -> set[Key]: ...

    def start(self, key: Key, function: Callable[[], Any]) -> None: ...

    def next(self) -> tuple[Key, Any]:
        """Wait for a result; an exception of the function is raised here."""
        ...

    def stop(self, keys: Iterable[Key]) -> None: ...


class Here(Generic[Key]):
    """One at a time, in this process."""

    def __init__(self) -> None:
        self._waiting: dict[Key, Callable[[], Any]] = {}

    def running(self) -> set[Key]:
        return set(self._waiting)

    def start(self, key: Key, function: Callable[[], Any]) -> None:
        self._waiting[key] = function

    def next(self) -> tuple[Key, Any]:
        key = next(iter(self._waiting))
        return key, self._waiting.pop(key)()

    def stop(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._waiting.pop(key, None)


class Forked(Generic[Key]):
    """Several at a time. A fork takes the question along as it is; nothing but results needs to be serialised.

    A worker that is stopped is killed with all that it started: everything that it writes is written whole or not at
    all, and what it leaves is tidied up by the one who stopped it.
    """

    def __init__(self) -> None:
        self._workers: dict[Key, _Worker] = {}
        self._context = multiprocessing.get_context("fork")

    def running(self) -> set[Key]:
        return set(self._workers)

    def start(self, key: Key, function: Callable[[], Any]) -> None:
        receiver, sender = self._context.Pipe(duplex=False)
        mark = uuid.uuid4().hex
        started = self._context.Process(target=_work, args=(function, sender, mark, os.getpid()))
        with process.deferred_signals():
            started.start()
            self._workers[key] = _Worker(started, receiver, mark)
        sender.close()

    def next(self) -> tuple[Key, Any]:
        ready = wait([worker.receiver for worker in self._workers.values()])
        key, worker = next((key, worker) for key, worker in self._workers.items() if worker.receiver in ready)
        try:
            failed, result = worker.receiver.recv()
        except EOFError:
            worker.process.join()
            self.stop([key])
            raise WorkerDied(f"the worker for {key} ended with exit status {worker.process.exitcode}") from None
        self.stop([key])
        if failed:
            raise result
        return key, result

    def stop(self, keys: Iterable[Key]) -> None:
        for key in [key for key in keys if key in self._workers]:
            worker = self._workers[key]
            worker.process.kill()
            worker.process.join()
            _processes.kill_marked(f"{MARK}={worker.mark}")
            worker.receiver.close()
            del self._workers[key]


@dataclass(frozen=True)
class _Worker:
    process: ForkProcess
    receiver: Connection
    mark: str


def _work(function: Callable[[], Any], sender: Connection, mark: str, parent: int) -> None:
    # Ctrl-C reaches the whole group of a terminal; it is the parent's to stop its workers. A handler that does nothing
    # is not handed on to children, as SIG_IGN would be.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _processes.die_with_parent(parent, signal.SIGTERM)
    os.environ[MARK] = mark
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        outcome: tuple[bool, Any] = (False, function())
    except Exception as error:
        outcome = (True, error)
    sender.send(outcome)
