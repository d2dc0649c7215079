"""Workers: test several candidates at a time, each in a forked process of its own, and stop those not needed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import uuid
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, Generic, TypeVar

from pytest_trlcompat import _processes
from pytest_trlcompat.matrix import process

__all__ = ["WORKER_VARIABLE", "ForkedWorkers", "SerialWorker", "WorkerDied"]

Key = TypeVar("Key", bound=Hashable)
WORKER_VARIABLE = "_TRLCOMPAT_WORKER"
"""An environment variable that marks what a worker has started, which is killed with it. A program that must survive is
started without it."""


class WorkerDied(RuntimeError):
    """A worker ended without a result."""


class SerialWorker(Generic[Key]):
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


class ForkedWorkers(Generic[Key]):
    """Several at a time. A fork inherits the function as it is; only results need to be serialised.

    A worker that is stopped is killed with all that it has started: whatever it writes is written completely or not at
    all, and the caller cleans up what it leaves.
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
        # A signal between these two lines would leave a worker that nobody stops.
        with process.deferred_signals():
            started.start()
            self._workers[key] = _Worker(started, receiver, mark)
        # With this end open here, too, nobody would notice when the worker dies: the pipe would never end.
        sender.close()

    def next(self) -> tuple[Key, Any]:
        ready = wait([worker.receiver for worker in self._workers.values()])
        key, worker = next((key, worker) for key, worker in self._workers.items() if worker.receiver in ready)
        try:
            failed, result = worker.receiver.recv()
        # Its end of the pipe was closed without a result: it was killed, or its result could not be serialised.
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
            _processes.kill_marked(f"{WORKER_VARIABLE}={worker.mark}")
            worker.receiver.close()
            del self._workers[key]


@dataclass(frozen=True)
class _Worker:
    process: ForkProcess
    receiver: Connection
    mark: str


def _work(function: Callable[[], Any], sender: Connection, mark: str, parent: int) -> None:
    # Ctrl-C reaches every process of a terminal's group, but stopping workers is up to the parent. A handler that does
    # nothing is not inherited by the programs that a worker starts, as SIG_IGN would be.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    # The handlers that the fork has from its parent raise KeyboardInterrupt; a worker is to end at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _processes.die_with_parent(parent, signal.SIGTERM)
    os.environ[WORKER_VARIABLE] = mark
    # The parent forks with these blocked, and a fork inherits that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        outcome: tuple[bool, Any] = (False, function())
    except Exception as error:
        # It is raised in the parent, where somebody waits for the result.
        outcome = (True, error)
    sender.send(outcome)
