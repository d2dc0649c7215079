"""Workers: examine several candidates at a time, each in a forked process of its own, and stop those not needed.

Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Hashable, Iterable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["Forked", "Here", "WorkerDied", "Workers"]

Key = TypeVar("Key", bound=Hashable)
_GRACE = 10.0
"""Seconds in which a worker that was told to stop ends its own children."""


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
    """Several at a time. A fork takes the question along as it is; nothing but results needs to be serialised."""

    def __init__(self) -> None:
        self._workers: dict[Key, tuple[ForkProcess, Connection]] = {}
        self._context = multiprocessing.get_context("fork")

    def running(self) -> set[Key]:
        return set(self._workers)

    def start(self, key: Key, function: Callable[[], Any]) -> None:
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_work, args=(function, sender, os.getpid()))
        process.start()
        sender.close()
        self._workers[key] = (process, receiver)

    def next(self) -> tuple[Key, Any]:
        ready = wait([receiver for _, receiver in self._workers.values()])
        key = next(key for key, (_, receiver) in self._workers.items() if receiver in ready)
        process, receiver = self._workers.pop(key)
        try:
            failed, result = receiver.recv()
        except EOFError:
            process.join()
            raise WorkerDied(f"the worker for {key} ended with exit status {process.exitcode}") from None
        finally:
            receiver.close()
        process.join()
        if failed:
            raise result
        return key, result

    def stop(self, keys: Iterable[Key]) -> None:
        stopped = [self._workers.pop(key) for key in list(keys) if key in self._workers]
        for process, _ in stopped:
            process.terminate()
        for process, receiver in stopped:
            process.join(_GRACE)
            if process.is_alive():
                process.kill()
                process.join()
            receiver.close()


def _work(function: Callable[[], Any], sender: Connection, parent: int) -> None:
    signal.signal(signal.SIGTERM, _interrupt)
    # Ctrl-C reaches the whole group of a terminal; the parent tells its workers to stop once, by SIGTERM. A handler
    # that does nothing is not handed on to children, as SIG_IGN would be.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            outcome: tuple[bool, Any] = (False, function())
        except Exception as error:
            outcome = (True, error)
        if os.getppid() == parent:
            sender.send(outcome)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)
