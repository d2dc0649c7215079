"""Whether a process is still there, programs that launch, and bodies for ranks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pytest_trlcompat._processes import is_alive


def open_in_server(server: int) -> int:
    """For a rank: how many descriptors its server has open once it waits for its ranks.

    Before, it still closes some that it has passed on; the last that it opens is what it waits with.
    """
    opened: list[str] = []
    while "anon_inode:[eventpoll]" not in opened:
        opened = []
        for descriptor in Path(f"/proc/{server}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                opened.append(os.readlink(descriptor))
    return len(opened)


def wait_until_gone(pid: int) -> None:
    wait_until(lambda: not is_alive(pid), f"process {pid} is still there")


def wait_until(holds: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


def program(text: str) -> list[str]:
    """A command that runs a Python program with this process's path."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{text}"]


def output_of(command: Sequence[str], **variables: str) -> str:
    """What a command prints, which must succeed; with further environment variables."""
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def unprivileged() -> list[str]:
    """What to put before a command so that limits and permissions hold for it, as they do not for root.

    The other user may search and read all folders, since the interpreter may lie in root's own.
    """
    if os.getuid():
        return []
    kept = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    return permitted("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", *kept)


def permitted(*before: str) -> list[str]:
    """The beginning of a command; the test is skipped where this machine does not have or permit it."""
    try:
        tried = subprocess.run([*before, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip(f"{before[0]} is not installed")
    if tried.returncode:
        pytest.skip(f"{' '.join(before)} is not permitted here: {tried.stderr.strip()}")
    return list(before)


def raise_with_output() -> None:
    print("before the end")
    raise LookupError("no such thing")
