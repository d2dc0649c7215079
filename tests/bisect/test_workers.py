"""Workers: results come back, and a worker that is stopped leaves nothing running."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.bisect.workers import ForkedWorkers, WorkerDied

from ..launch.processes import wait_until_gone

# Python 3.12 and later warn about forking while pytest-xdist's threads run; the program itself has no threads.
FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@FORKS
def test_a_worker_returns_its_result_or_its_exception() -> None:
    workers: ForkedWorkers[str] = ForkedWorkers()
    workers.start("good", lambda: 3)
    assert workers.next() == ("good", 3)

    def fails() -> None:
        raise BisectError("no")

    workers.start("bad", fails)
    with pytest.raises(BisectError, match="no"):
        workers.next()
    workers.start("dead", lambda: os._exit(7))
    with pytest.raises(WorkerDied, match="dead ended with exit status 7"):
        workers.next()
    assert workers.running() == set()


@FORKS
def test_a_worker_that_is_stopped_leaves_nothing_behind(tmp_path: Path) -> None:
    def long() -> None:
        subprocess.run(["/bin/sh", "-c", f"echo $$ > {tmp_path}/pid; setsid sleep 300 & sleep 300"], check=True)

    workers: ForkedWorkers[int] = ForkedWorkers()
    workers.start(0, long)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.02)
    workers.stop([0, 5])
    pid = int((tmp_path / "pid").read_text())
    wait_until_gone(pid)
    assert workers.running() == set()
