"""Another user of this machine, as whom tests try what nobody but the owner may do; only root can become one."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

__all__ = ["STRANGER", "called", "needs_root", "open_folder", "tried", "trying"]

STRANGER = 65534
"""The id of the user, and of its group: ``nobody`` on most systems."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can try as another user")

_BECOME = f"""
import fcntl, json, os, socket, sys, time
os.chdir("/")
os.setgroups([])
os.setgid({STRANGER})
os.setuid({STRANGER})
def attempt(action):
    try:
        action()
    except OSError as error:
        return type(error).__name__
    return "it worked"
"""


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter and read, as a home directory often is; pytest's own may not be entered."""
    folder = Path(tempfile.mkdtemp(prefix="trlcompat-test-of-strangers-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def tried(code: str, *arguments: object) -> str:
    """What a program of the stranger prints, which has ``attempt(action)``: the name of its error, or ``it worked``."""
    command = [sys.executable, "-c", _BECOME + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def called(action: Callable[[], object]) -> str:
    """What a function of ours does as the stranger, to whom we are one: the name of its error, or ``it worked``."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            action()
            os.write(writing, b"it worked")
        except BaseException as error:
            os.write(writing, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        outcome = stream.read()
    os.waitpid(pid, 0)
    return outcome


@contextlib.contextmanager
def trying(code: str, *arguments: object) -> Iterator[str]:
    """The first line that a program of the stranger prints, which then goes on until the end of the block."""
    command = [sys.executable, "-c", _BECOME + code + "\nsys.stdin.read()\n", *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
            process.wait(60)
