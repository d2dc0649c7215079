"""A child that leaves nothing behind, whether it ends, is interrupted, or its parent is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_trlcompat.matrix import process

from ..launch.processes import wait_until_gone

ROOT = Path(__file__).resolve().parents[2]

# A child that ignores Ctrl-C, like one that computes outside Python, and that starts a grandchild in a session of
# its own, out of reach of any process group. It writes their pids.
CHILD = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
target = pathlib.Path(sys.argv[1])
(target.parent / "part").write_text(f"{os.getpid()} {grandchild.pid}")
(target.parent / "part").rename(target)
time.sleep(float(sys.argv[2]))
"""

PARENT = """
import os, pathlib, sys
sys.path.insert(0, sys.argv[1])
from pytest_trlcompat.matrix import process
try:
    process.run([sys.executable, "-c", sys.argv[2], sys.argv[3], "300"], env=os.environ, cwd=pathlib.Path.cwd())
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_the_exit_status_is_the_childs(tmp_path: Path) -> None:
    assert process.run([sys.executable, "-c", "raise SystemExit(7)"], env=os.environ, cwd=tmp_path) == 7
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert process.run([sys.executable, "-c", code], env=os.environ, cwd=tmp_path) == -signal.SIGKILL


def test_the_child_gets_the_environment_folder_and_group_of_its_own(tmp_path: Path) -> None:
    code = "import os; open('seen', 'w').write(f\"{os.environ['A']} {os.getpgrp() == os.getpid()}\")"
    assert process.run([sys.executable, "-c", code], env={"A": "b"}, cwd=tmp_path) == 0
    assert (tmp_path / "seen").read_text() == "b True"


def test_processes_that_the_child_left_running_are_ended(tmp_path: Path) -> None:
    assert process.run([sys.executable, "-c", CHILD, str(tmp_path / "pids"), "0"], env=os.environ, cwd=tmp_path) == 0
    _, grandchild = pids(tmp_path / "pids")
    wait_until_gone(grandchild)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_ends_all_descendants_within_the_time_that_nox_allows(
    tmp_path: Path, number: signal.Signals
) -> None:
    with parent(tmp_path) as running:
        family = pids(tmp_path / "pids")
        started = time.monotonic()
        running.send_signal(number)
        assert running.wait(10) == 130
        assert time.monotonic() - started < 2
        for pid in family:
            wait_until_gone(pid)


def test_the_child_ends_when_the_parent_is_killed(tmp_path: Path) -> None:
    with parent(tmp_path) as running:
        child, grandchild = pids(tmp_path / "pids")
        try:
            running.kill()
            running.wait(10)
            wait_until_gone(child)
        finally:
            os.kill(grandchild, signal.SIGKILL)  # no other process knows of it


def test_signal_handlers_are_put_back(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    process.run([sys.executable, "-c", ""], env=os.environ, cwd=tmp_path)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


@contextlib.contextmanager
def parent(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", PARENT, str(ROOT), CHILD, str(folder / "pids")]
    with subprocess.Popen(command, start_new_session=True) as running:
        try:
            yield running
        finally:
            running.kill()


def pids(path: Path, seconds: float = 20) -> tuple[int, int]:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"no child wrote {path} within {seconds} s"
        time.sleep(0.01)
    child, grandchild = map(int, path.read_text().split())
    return child, grandchild
