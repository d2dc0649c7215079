"""Another user of this machine, as whom tests try what nobody but the owner may do; only root can become one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["STRANGER", "become_stranger", "called", "needs_root", "open_folder", "returned", "tried", "trying"]

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


def become_stranger() -> None:
    """Make this process the stranger's, for good."""
    os.setgroups([])
    os.setgid(STRANGER)
    os.setuid(STRANGER)


def returned(function: Callable[[], Any]) -> Any:
    """What a function of ours returns in a child that is the stranger's, as JSON has it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            become_stranger()
            os.write(writing, json.dumps(function()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        answer = stream.read()
    os.waitpid(pid, 0)
    return json.loads(answer)


def called(action: Callable[[], object]) -> str:
    """What a function of ours does as the stranger, to whom we are one: the name of its error, or ``it worked``."""

    def outcome() -> str:
        try:
            action()
        except BaseException as error:
            return type(error).__name__
        return "it worked"

    return str(returned(outcome))


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
