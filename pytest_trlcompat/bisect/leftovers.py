"""What a bisect leaves where it is killed: a shell's children, files of commits, folders of runs. All of it is removed.

Nothing that was killed can clean up, so a process of its own waits for the end of the command and does. Where that was
killed too, the next command removes the files. Linux; imports only the standard library and this package.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pytest_trlcompat import _processes
from pytest_trlcompat.bisect.candidates.commits import Clone, is_over
from pytest_trlcompat.bisect.errors import BisectError

__all__ = ["main", "remove", "removed"]

_VARIABLE = "_TRLCOMPAT_BISECT"
"""An environment variable that marks what a command has started."""
_PATIENCE = 10.0
"""Seconds within which workers end, which the kernel tells to when their command ends."""
_POLL = 0.2
_CODE = """
import select, sys
ended = select.poll()
ended.register(int(sys.argv[1]), select.POLLIN)
ended.poll()
sys.path.insert(0, sys.argv[2])
from pytest_trlcompat.bisect.leftovers import main
main(*sys.argv[3:])
"""
"""It waits for the end of a process, named by a descriptor (``pidfd_open``), before it imports anything else."""


def remove(state: Path, clones: Iterable[Clone] = (), *, own_too: bool = False) -> int:
    """Remove the files of commits and of runs whose process has ended.

    Args:
        state: the folder of all commands, with their journals.
        own_too: also those of this process, which is done with them.

    Returns:
        How many folders were removed.
    """
    count = 0
    for clone in clones:
        # The command itself says what is wrong with a clone.
        with contextlib.suppress(BisectError):
            count += clone.remove_worktrees((state / "work").resolve(), own_too=own_too)
    for folder in state.glob("*/work/run-*"):
        if is_over(folder.name.split("-")[1], own_too=own_too):
            shutil.rmtree(folder, ignore_errors=True)
            count += 1
    return count


@contextlib.contextmanager
def removed(state: Path, clones: Sequence[Clone]) -> Iterator[None]:
    """Remove what earlier commands have left, and what this one leaves, however it ends within the block."""
    remove(state, clones)
    mark = uuid.uuid4().hex
    watcher = _start(f"{_VARIABLE}={mark}", state, clones)
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = mark
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
        with _processes.ignore_signals():
            remove(state, clones, own_too=True)
            watcher.kill()
            watcher.wait()


def _start(mark: str, state: Path, clones: Sequence[Clone]) -> subprocess.Popen[bytes]:
    # Not the process number, which the system may have given to another process by the time somebody looks.
    command = _processes.beyond_standard(os.pidfd_open(os.getpid()))
    try:
        return subprocess.Popen(
            [
                *(sys.executable, "-c", _CODE, str(command), str(Path(__file__).resolve().parents[2])),
                *(mark, str(state.resolve()), *(str(clone.path) for clone in clones)),
            ],
            pass_fds=[command],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C reaches the command, which cleans up itself.
            start_new_session=True,
        )
    finally:
        os.close(command)


def main(mark: str, state: str, *clones: str) -> None:
    """After the end of a command, end all that is marked, and remove its files.

    Args:
        mark: a text ``NAME=value`` in the environment of what the command has started.
    """
    deadline = time.monotonic() + _PATIENCE
    quiet = 0
    # Three quiet looks in a row: a worker that is just ending may still start something or leave a folder.
    while quiet < 3 and time.monotonic() < deadline:
        processes = _processes.marked(mark)
        _processes.kill_marked(mark)
        removed = remove(Path(state), [Clone(Path(clone)) for clone in clones])
        quiet = 0 if processes or removed else quiet + 1
        time.sleep(_POLL)
