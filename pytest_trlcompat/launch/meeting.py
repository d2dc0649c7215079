"""Where several machines meet: a board of notes at machine 0, for those alone who know the secret.

Both sides prove that they know it, by the challenges of :mod:`multiprocessing.connection`, before either reads anything
else; what they then send is JSON, and nothing is unpickled. It is not encrypted.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from pytest_trlcompat.launch.cluster import SECRET_VARIABLE

__all__ = ["Board", "Visitor"]

_LONGEST = 4096  # bytes of a message
_RETRY = 0.1
_STRANGER_TIMEOUT = 10.0


class Board:
    """The notes, which :meth:`serve` shows to visitors.

    Args:
        listener: a socket that listens.
        secret: what visitors must know.
    """

    def __init__(self, listener: socket.socket, secret: str) -> None:
        self._listener, self._secret = listener, secret.encode()
        self._changed = threading.Condition()
        self._numbers: dict[str, int] = {}
        self._refused: list[str] = []

    def serve(self) -> None:
        """Answer every visitor, in a thread of its own, for ever."""
        while True:
            channel, (host, *_) = self._listener.accept()
            threading.Thread(target=self._receive, args=(channel, host), daemon=True).start()

    def _receive(self, channel: socket.socket, host: str) -> None:
        # Before the challenge: who says nothing must not hold a thread for ever.
        _set_timeout(channel, _STRANGER_TIMEOUT)
        # The descriptor is the connection's from here on; the socket has none left to close.
        with channel, Connection(channel.detach()) as connection:
            try:
                deliver_challenge(connection, self._secret)
                answer_challenge(connection, self._secret)
            except AuthenticationError:
                with self._changed:
                    self._refused.append(host)
                return
            except (EOFError, OSError, ValueError):  # a stranger, who speaks otherwise or not at all
                return
            try:
                request = json.loads(connection.recv_bytes(_LONGEST))
                connection.send_bytes(json.dumps(self._answer(**request)).encode())
            except (EOFError, OSError):
                return

    def _answer(self, key: str, amount: int | None, least: int, limit: float) -> dict[str, Any]:
        """Add to a number, then wait until it is ``least``; ``amount=None`` sets it to ``least``."""
        with self._changed:
            self._numbers[key] = least if amount is None else self._numbers.get(key, 0) + amount
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._numbers[key] >= least, limit)
            return {"number": self._numbers[key], "refused": sorted(set(self._refused))}


class Visitor:
    """A machine's way to the board at ``address``.

    Args:
        timeout: seconds until a request gives up; machine 0 may start later.

    Raises, in each method:
        PermissionError: the secrets differ.
        TimeoutError: nobody answered, or what was waited for did not happen.
    """

    def __init__(self, address: tuple[str, int], secret: str, timeout: float) -> None:
        self._address, self._secret, self._timeout = address, secret.encode(), timeout

    @property
    def _where(self) -> str:
        return f"machine 0 at {self._address[0]}:{self._address[1]}"

    def set(self, key: str, number: int) -> None:
        """Write a positive number."""
        self._ask(key, None, number)

    def get(self, key: str) -> int:
        """Read a number, once it is written."""
        answer = self._ask(key, 0, 1)
        if answer["number"] < 1:
            raise TimeoutError(f"{self._where} wrote no {key!r} within {self._timeout:g} s")
        return int(answer["number"])

    def tell(self, key: str) -> None:
        """Say that this machine is there."""
        self._ask(key, 1, 0)

    def gather(self, key: str, machines: int, limit: float = math.inf) -> None:
        """Say that this machine is there, and wait until ``machines`` of them have said so, for ``limit`` seconds."""
        answer = self._ask(key, 1, machines, min(limit, self._timeout))
        if answer["number"] < machines:
            refused = f"; turned away for another secret: {', '.join(answer['refused'])}" if answer["refused"] else ""
            raise TimeoutError(
                f"{answer['number']} of {machines} machines met at {self._where} within {self._timeout:g} s{refused}"
            )

    def _ask(self, key: str, amount: int | None, least: int, limit: float | None = None) -> dict[str, Any]:
        deadline = time.monotonic() + self._timeout
        request = {"key": key, "amount": amount, "least": least, "limit": self._timeout if limit is None else limit}
        channel = self._connect(deadline)
        # Longer than the board itself waits, so that this only ends a connection whose other end has died.
        _set_timeout(channel, self._timeout + _STRANGER_TIMEOUT)
        with channel, Connection(channel.detach()) as connection:
            try:
                # The other way round than the board, which asks first: else both would wait.
                answer_challenge(connection, self._secret)
                deliver_challenge(connection, self._secret)
            except AuthenticationError:
                raise PermissionError(
                    f"{self._where} has another secret: set {SECRET_VARIABLE} to the same on every machine"
                ) from None
            except (EOFError, OSError, ValueError) as error:
                raise TimeoutError(f"{self._where} did not prove that it knows the secret: {error!r}") from error
            connection.send_bytes(json.dumps(request).encode())
            try:
                answer: dict[str, Any] = json.loads(connection.recv_bytes(_LONGEST))
            except (EOFError, OSError) as error:
                raise TimeoutError(f"{self._where} did not answer within {self._timeout:g} s") from error
        return answer

    def _connect(self, deadline: float) -> socket.socket:
        while True:
            try:
                return socket.create_connection(self._address, timeout=max(1.0, deadline - time.monotonic()))
            except OSError as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self._where} was not there within {self._timeout:g} s: {error}") from error
                time.sleep(_RETRY)


def _set_timeout(channel: socket.socket, seconds: float) -> None:
    """Have the kernel end what waits longer, since a ``Connection`` knows no timeout."""
    channel.settimeout(None)
    limit = struct.pack("ll", math.ceil(seconds), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        channel.setsockopt(socket.SOL_SOCKET, option, limit)
