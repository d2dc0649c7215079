"""Whether another user of this machine could change what is loaded from a folder, or hold a lock that we wait for."""

from __future__ import annotations

import functools
import grp
import os
import pwd
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

__all__ = ["UntrustedError", "check_files", "check_folder", "make_folder", "open_lock"]


class UntrustedError(Exception):
    """Another user could change a file before it is loaded; the text names the folder or file, and why."""


def check_folder(folder: Path) -> None:
    """Check a folder and every one on the way to it, as ssh does for its keys.

    Each must belong to this user or to root, and nobody else may write to it; to those on the way others may where the
    sticky bit is set, as in ``/tmp``. A group that has no other member than this user counts as this user.

    Args:
        folder: an existing folder, without symbolic links on the way.

    Raises:
        UntrustedError: names the first folder for which this does not hold.
    """
    _check(folder, folder.stat())
    for above in folder.parents:
        _check(above, above.stat(), may_be_sticky=True)


def check_files(folder: Path, names: Iterable[str]) -> None:
    """Check files, and the folders between them and ``folder``, in the same way.

    Args:
        names: of the files, relative to ``folder``, such as ``package/module.py``.

    Raises:
        UntrustedError: names the first of them.
    """
    files = set(names)
    between = {name[:end] for name in files for end, letter in enumerate(name) if letter == "/"}
    for name in sorted(files | between):
        path = os.path.join(folder, name)
        _check(path, os.lstat(path))


def make_folder(folder: Path) -> None:
    """Make a folder, and those on the way to it, so that nobody else can write to it, whatever the umask; check it.

    Raises:
        UntrustedError: see :func:`check_folder`.
    """
    for path in (*reversed(folder.parents), folder):
        path.mkdir(0o755, exist_ok=True)
    check_folder(folder)


def open_lock(path: Path) -> TextIO:
    """Open a file for ``flock`` that only those can open who may write to it.

    Whoever can read a file can lock it (``flock(2)``), for as long as they like, and this process would wait for them.

    Raises:
        OSError: the system refused it, or ``path`` is a link.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    file = open(os.open(path, flags, 0o660), "r+", encoding="utf-8")  # noqa: SIM115
    status = os.fstat(file.fileno())
    mode = stat.S_IMODE(status.st_mode)
    # A group may lock together where the umask lets it write, as in a checkout that several people share.
    closed = 0o660 if mode & stat.S_IWGRP else 0o600
    if mode & ~closed and status.st_uid == os.geteuid():
        os.fchmod(file.fileno(), mode & closed)
    return file


def _check(path: str | Path, status: os.stat_result, *, may_be_sticky: bool = False) -> None:
    if status.st_uid not in {0, os.geteuid(), *_unmapped_root()}:
        raise UntrustedError(f"{path} belongs to {_name(status.st_uid)}")
    if may_be_sticky and status.st_mode & stat.S_ISVTX:
        return
    mode = f"{path} (mode {stat.S_IMODE(status.st_mode):04o})"
    if status.st_mode & stat.S_IWOTH:
        raise UntrustedError(f"every user can write to {mode}")
    if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid):
        raise UntrustedError(f"the group {_group(status.st_gid)} can write to {mode}")


@functools.cache
def _unmapped_root() -> frozenset[int]:
    """The apparent owner of root's files in a user namespace that does not map root; nobody there can become it."""
    try:
        mapped = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if all(int(outside) != 0 for _, outside, _ in mapped):
            return frozenset({int(Path("/proc/sys/kernel/overflowuid").read_text())})
    # A kernel without user namespaces has no such files.
    except (OSError, ValueError):
        pass
    return frozenset()


def _is_own_group(gid: int) -> bool:
    """Whether it is the user's private group, with which many distributions make home directories writable."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    # In a container an id may have no name.
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _name(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
