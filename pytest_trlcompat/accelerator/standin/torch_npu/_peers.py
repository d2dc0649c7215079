"""Refuses connections of other users among those that gloo takes for other ranks.

gloo listens on the loopback, and takes for a rank whoever first sends the number of a pair; these numbers count from 0.
So another user of the machine could stand in for a rank, and objects that ranks exchange are unpickled. Both ends of a
connection on the loopback are in the kernel's table of sockets, with the owner of each.
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

_LISTENS = "0A"  # TCP_LISTEN, as the kernel numbers the states of a socket
_TABLES = ("tcp", "tcp6")


class _Socket(NamedTuple):
    local: str
    remote: str
    state: str
    user: int
    inode: str


@contextlib.contextmanager
def only_own() -> Iterator[None]:
    """Check who has connected to the sockets that this process makes within the block.

    Sockets beyond the loopback, which ranks on several machines have, are not checked.

    Raises:
        RuntimeError: the other end of a connection belongs to another user, or has ended, so that nobody knows whose
            end it was.
    """
    before = _own_inodes()
    yield
    inodes, sockets = _own_inodes(), _sockets()
    own_sockets = [entry for entry in sockets if entry.inode in inodes]
    new = (entry for entry in own_sockets if entry.inode not in before)
    ports = {entry.local for entry in new if entry.state == _LISTENS and _is_loopback(entry)}
    ends = {(entry.local, entry.remote): entry for entry in sockets}
    for entry in own_sockets:
        if entry.local in ports and entry.state != _LISTENS:
            other = ends.get((entry.remote, entry.local))
            # The kernel shows an inode of 0, and no owner, once the process at that end has closed its socket.
            if other is None or other.inode == "0" or other.user != os.getuid():
                _refuse(entry, other)


def _refuse(connection: _Socket, other: _Socket | None) -> None:
    known = other is not None and other.inode != "0"
    whose = f"the user with the id {other.user}" if other is not None and known else "a process that has ended"
    port = int(connection.local.rpartition(":")[2], 16)
    raise RuntimeError(
        f"{whose} is connected to port {port} of the loopback, where gloo lets other ranks of this launch in; "
        "nothing that it sends can be trusted, so there is no process group"
    )


def _sockets() -> list[_Socket]:
    """The sockets of all processes in this network namespace."""
    sockets = []
    for table in _TABLES:
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                # number, local and remote address, state, queues, timer, retransmissions, user, timeout, inode
                fields = line.split()
                sockets.append(_Socket(fields[1], fields[2], fields[3], int(fields[7]), fields[9]))
    return sockets


def _own_inodes() -> set[str]:
    """The inodes of this process's sockets."""
    inodes = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            kind, _, inode = os.readlink(f"/proc/self/fd/{descriptor}").partition(":")
            if kind == "socket":
                inodes.add(inode.strip("[]"))
    return inodes


def _is_loopback(entry: _Socket) -> bool:
    """Whether the local address is on the loopback. The kernel prints it as words in the machine's byte order."""
    text = entry.local.partition(":")[0]
    words = [int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8)]
    return ipaddress.ip_address(b"".join(words)).is_loopback
