"""The file in which the ranks of one machine leave each other notes: one rank makes it, the others find it by its name.

The name comes out of a store, which on several machines is a port that asks for no secret. So the name is no path: the
file is looked for among this process's temporary files, and taken only if a rank of this user has made it there.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile

__all__ = ["create", "open_existing", "remove"]

_PREFIX = "trlcompat-notes-"
_NAME = re.compile(rf"{_PREFIX}\w{{8}}", re.ASCII)


def create(size: int) -> tuple[int, str]:
    """Make a file of zeros.

    Args:
        size: in bytes.

    Returns:
        The file's descriptor and name; -1 and an empty name where the file cannot be made.
    """
    try:
        descriptor, path = tempfile.mkstemp(prefix=_PREFIX)
    except OSError:
        return -1, ""
    # All of it on the disk: a process that writes into a hole of a mapped file is killed if the disk is full.
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        os.unlink(path)
        return -1, ""
    return descriptor, os.path.basename(path)


def open_existing(name: str, size: int) -> int:
    """Open a file that another rank has made.

    Args:
        size: of the file, in bytes.

    Returns:
        Its descriptor; -1 where there is no file of this user, this size and this kind.
    """
    if not _NAME.fullmatch(name):
        return -1
    try:
        # Neither a link nor a pipe, which would block: another user may have put either there.
        descriptor = os.open(_path(name), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return -1
    status = os.fstat(descriptor)
    is_private = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    if is_private and status.st_size == size:
        return descriptor
    os.close(descriptor)
    return -1


def remove(name: str) -> None:
    """Remove the file's name. Processes that have the file open keep it."""
    os.unlink(_path(name))


def _path(name: str) -> str:
    return os.path.join(tempfile.gettempdir(), name)
