"""Framed messages between the test process, its server, the keepers of cold ranks, and the ranks.

The messages are unpickled, so no other user must be able to send one. They go over inherited socket pairs, which have
no name. Keepers send theirs over a socket in a folder that only this user can enter, and the peer's user is checked
too.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Buffer", "receive", "send", "short_path"]

_HEADER = struct.Struct("!Q")


def send(channel: socket.socket, message: Any) -> None:
    """Send one message.

    Raises:
        OSError: the other side has gone.
    """
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    channel.sendall(_HEADER.pack(len(data)))
    channel.sendall(data)


def receive(channel: socket.socket) -> Any:
    """Wait for one message.

    Raises:
        EOFError: the other side closed the connection before a complete message.
        TimeoutError: the socket's timeout passed.
    """
    (length,) = _HEADER.unpack(_exactly(channel, _HEADER.size))
    return pickle.loads(_exactly(channel, length))  # noqa: S301 - of this user's processes alone, see above


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Another path of a Unix socket, by a descriptor of its folder."""
    # A socket's path may have 107 bytes only (unix(7)).
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _exactly(channel: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        # Limited, since recv allocates at once as much as it is asked for.
        part = channel.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise EOFError("the other side closed the connection")
        parts += part
    return bytes(parts)


class Buffer:
    """Assembles messages from the data of a non-blocking socket."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Add bytes; return the messages that they completed."""
        self._data += data
        messages = []
        while len(self._data) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._data)
            end = _HEADER.size + length
            if len(self._data) < end:
                break
            messages.append(pickle.loads(bytes(self._data[_HEADER.size : end])))  # noqa: S301 - see above
            del self._data[:end]
        return messages
