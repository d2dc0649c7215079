"""Ends what a process leaves behind when it is killed: its marked processes, and the folder that it made.

It is a separate process, since a process that was killed cannot clean up, and its descendants may have been killed with
it. It removes only the folder that it was told of, and only while that is still the same one. Linux only.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

from pytest_trlcompat import _processes

__all__ = ["OwnFolder", "main"]

_GRACE = 5.0
"""Seconds in which the marked processes may end by themselves, as a server does whose client has gone."""
_REMOVE_TIMEOUT = 30.0
_POLL = 0.05
_CODE = "import sys; sys.path.insert(0, sys.argv[1]); from pytest_trlcompat._cleaner import main; main(*sys.argv[2:])"


class OwnFolder:
    """A folder that this process has made, and that is removed when this process ends, in whatever way.

    Args:
        path: the folder.
        mark: a text ``NAME=value`` in the environment of processes that end with this one as well.

    Raises:
        OSError: the process that cleans up cannot be started.
    """

    def __init__(self, path: Path, mark: str) -> None:
        self.path = path
        self._identity = _identity(path)
        self._pid = os.getpid()
        # A descriptor: by the time somebody looks, the number may be another process's.
        watched = _processes.beyond_standard(os.pidfd_open(self._pid))
        try:
            self._cleaner = subprocess.Popen(
                [
                    # Isolated: it imports the standard library and this package, whatever else is installed or set.
                    *(sys.executable, "-I", "-S", "-c", _CODE, str(Path(__file__).parents[1])),
                    *(str(watched), str(path), self._identity, mark),
                ],
                pass_fds=[watched],
                cwd="/",
                # Without variables it carries no mark, by which others would end it with what it is to clean up.
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Ctrl-C reaches this process, which removes the folder itself.
                start_new_session=True,
            )
        finally:
            os.close(watched)

    @property
    def exists(self) -> bool:
        """Whether it is still there; a folder that somebody has put in its place does not count."""
        return _identity(self.path) == self._identity

    def remove(self) -> None:
        """Remove the folder with all that is in it, and end the process that would do so."""
        if os.getpid() != self._pid:
            # A forked copy of the process that made it, which still uses it.
            return
        _remove(self.path, self._identity)
        self._cleaner.kill()
        self._cleaner.wait()


def _identity(path: Path) -> str:
    """The device and the number of the file ``path``, no link followed; empty if there is none."""
    try:
        status = path.lstat()
    except OSError:
        return ""
    return f"{status.st_dev}:{status.st_ino}"


def _remove(path: Path, identity: str) -> None:
    if _identity(path) == identity:
        shutil.rmtree(path, ignore_errors=True)


def main(process: str, folder: str, identity: str, mark: str) -> None:
    """Wait for the end of a process, then end all that is marked, and remove its folder.

    Args:
        process: the number of a descriptor that refers to the process (``pidfd_open``).
        folder: the folder's path.
        identity: device and number of the folder when it was made.
        mark: a text ``NAME=value``.
    """
    watched = select.poll()
    watched.register(int(process), select.POLLIN)
    watched.poll()
    deadline = time.monotonic() + _GRACE
    while _processes.marked(mark) and time.monotonic() < deadline:
        time.sleep(_POLL)
    _processes.kill_marked(mark)
    deadline = time.monotonic() + _REMOVE_TIMEOUT
    while _identity(Path(folder)) == identity and time.monotonic() < deadline:
        # In vain while a process that is ending still writes.
        _remove(Path(folder), identity)
        time.sleep(_POLL)
