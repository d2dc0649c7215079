"""Files that several processes write: atomically, and one process at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from pytest_trlcompat._trust import open_lock
from pytest_trlcompat.matrix.errors import DiskFull, MatrixError

__all__ = ["disk_is_full", "explained_os_errors", "in_use", "locked", "unless_in_use", "write_whole"]


def write_whole(path: Path, content: str | bytes) -> None:
    """Write atomically: a reader, also after a crash, finds the old file or the new one, never a part of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, since os.replace is atomic within one file system alone.
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        # mkstemp gives mode 0600, with which others who may read the folder could not read the file.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` for the block.

    Args:
        waiting: called once when another process holds the lock, before waiting for it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The kernel releases the lock when its holder dies, so there are no stale ones.
    # It is closed on exec: a child that outlives its parent does not keep the lock.
    with open_lock(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is not None:
                waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def in_use(path: Path) -> Iterator[None]:
    """Mark what ``path`` stands for as in use within the block, for :func:`unless_in_use` in other processes.

    Any number of processes may do so at the same time; the kernel removes the mark when a process dies.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_lock(path) as file:
        # Waits where somebody removes it just now; who uses it looks afterwards whether it is there.
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def unless_in_use(path: Path) -> Iterator[bool]:
    """Yield whether no process uses what ``path`` stands for; if so, none can start to within the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_lock(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def disk_is_full(where: str = "") -> str:
    """The message for a full disk."""
    return (
        f"the disk is full{where}: free some space and run the same command again; "
        "finished verdicts are kept, and the sweep continues after them"
    )


@contextlib.contextmanager
def explained_os_errors() -> Iterator[None]:
    """Raise a full disk or a missing permission within the block as a :class:`MatrixError` that explains it."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(disk_is_full(where)) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise MatrixError(f"no permission to write{where}: {error.strerror}") from error
        raise
