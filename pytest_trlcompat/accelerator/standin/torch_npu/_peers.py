"""Refuses connections of other users among those that gloo takes for other ranks.

gloo listens on the loopback, and takes for a rank whoever first sends the number of a pair; they count from 0.
Another user of the machine could so stand in for a rank, and objects that ranks exchange are unpickled. Both ends of a
connection on the loopback are in the kernel's table, with the owner of each.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["only_own"]

_LISTENS = "0A"
_TABLES = ("tcp", "tcp6")


class _Socket(NamedTuple):
    local: str
    remote: str
    state: str
    user: int
    inode: str


@contextlib.contextmanager
def only_own() -> Iterator[None]:
    """Check what has connected to the sockets of this process that it made within the block.

    Sockets beyond the loopback, which ranks on several machines have, are not checked.

    Raises:
        RuntimeError: the other end of a connection belongs to another user, or has ended, so that nobody knows whose
            it was.
    """
    before = _own_inodes()
    yield
    inodes, sockets = _own_inodes(), _sockets()
    own = [each for each in sockets if each.inode in inodes]
    new = (each for each in own if each.inode not in before)
    ports = {each.local for each in new if each.state == _LISTENS and _is_loopback(each)}
    ends = {(each.local, each.remote): each for each in sockets}
    for each in own:
        if each.local in ports and each.state != _LISTENS:
            other = ends.get((each.remote, each.local))
            if other is None or other.inode == "0" or other.user != os.getuid():
                _refuse(each, other)


def _refuse(connection: _Socket, other: _Socket | None) -> None:
    known = other is not None and other.inode != "0"
    whose = f"the user with the id {other.user}" if other is not None and known else "a process that has ended"
    port = int(connection.local.rpartition(":")[2], 16)
    raise RuntimeError(
        f"{whose} is connected to port {port} of the loopback, where gloo lets other ranks of this launch in; "
        "nothing that it sends can be trusted, so there is no process group"
    )


def _sockets() -> list[_Socket]:
    found = []
    for table in _TABLES:
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                found.append(_Socket(fields[1], fields[2], fields[3], int(fields[7]), fields[9]))
    return found


def _own_inodes() -> set[str]:
    """Those of the sockets of this process."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            kind, _, inode = os.readlink(f"/proc/self/fd/{descriptor}").partition(":")
            if kind == "socket":
                found.add(inode.strip("[]"))
    return found


def _is_loopback(one: _Socket) -> bool:
    """The kernel prints an address as words in the machine's own order of bytes."""
    text = one.local.partition(":")[0]
    words = [int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8)]
    return ipaddress.ip_address(b"".join(words)).is_loopback
