"""Work in forked processes: what each reported is kept, however it ended."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Iterator

import pytest

from pytest_trlcompat._processes import die_with_parent

from .isolation import Ended, run_isolated


def work(task: str) -> Iterator[str]:
    yield f"began {task}"
    if task == "crash":
        faulthandler.disable()  # pytest's own, which would print a page
        os.kill(os.getpid(), signal.SIGSEGV)
    elif task == "hang":
        time.sleep(60)
    elif task == "busy":
        _compute(0.7)
    elif task == "busy for ever":
        _compute(float("inf"))
    elif task == "raise":
        raise ValueError("by\ntwo lines")
    elif task == "exit":
        os._exit(3)
    elif task == "long":
        yield "x" * 1_000_000
    yield "ended"


def _compute(seconds: float) -> None:
    """Take so much of a core, of which there may be little at a time."""
    while time.process_time() < seconds:
        pass


def run(*tasks: str, workers: int = 2) -> dict[str, Ended[str]]:
    return {ended.task: ended for ended in run_isolated(tasks, work, workers=workers, limit=1.0)}


@pytest.mark.parametrize("workers", [1, 3])
def test_each_task_ends_in_its_own_way(workers: int) -> None:
    ended = run("crash", "well", "hang", "raise", "exit", "long", workers=workers)
    assert {task: end.failure for task, end in ended.items() if task != "raise"} == {
        "crash": "killed by signal 11",
        "well": None,
        "hang": "over 1 s",
        "exit": "exit status 3",
        "long": None,
    }
    assert "ValueError: by\ntwo lines" in str(ended["raise"].failure)
    assert ended["crash"].reported == ["began crash"]
    assert ended["well"].reported == ["began well", "ended"]
    assert len(ended["long"].reported[1]) == 1_000_000


def test_a_task_that_waits_for_a_core_is_not_over_its_limit() -> None:
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(everywhere)})  # the tasks inherit it: each gets a fifth of the core, or less
    parent, hogs = os.getpid(), []
    try:
        for _ in range(4):
            hogs.append(os.fork() or _hog(parent))
        ended = run("busy", "busy for ever", workers=1)
    finally:
        os.sched_setaffinity(0, everywhere)
        for hog in hogs:
            os.kill(hog, signal.SIGKILL)
            os.waitpid(hog, 0)
    assert {task: end.failure for task, end in ended.items()} == {"busy": None, "busy for ever": "over 1 s"}


def _hog(parent: int) -> int:
    die_with_parent(parent)
    while True:
        pass


def test_what_is_to_be_done_after_a_failure_comes_next() -> None:
    def after(ended: Ended[str]) -> Iterator[str]:
        if ended.task == "crash":
            yield from ("first", "second")

    order = [ended.task for ended in run_isolated(["crash", "last"], work, workers=1, limit=5, after_failure=after)]
    assert order == ["crash", "first", "second", "last"]


def test_no_process_outlives_a_caller_that_stops() -> None:
    running = run_isolated(["well", "hang"], work, workers=2, limit=60)
    assert next(running).task == "well"
    started = time.monotonic()
    running.close()  # type: ignore[attr-defined] # a generator
    assert time.monotonic() - started < 30
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
