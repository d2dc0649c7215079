"""Where ranks and a vLLM server of the same user meet: a folder that nobody else can enter, and names in it.

A server answers at a port of the loopback, where every user of the machine may ask. What comes from there never says
where something is read or written: it names a *token*, and a token is of use only if a process of this user has left
something under it in the folder before. The folder's path comes from the environment, which the test process gives to
ranks and servers.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import secrets
import select
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pytest_trlcompat._cleaner import OwnFolder

__all__ = [
    "CONTROL",
    "SERVER",
    "ControlError",
    "Inbox",
    "announce_meeting",
    "check_token",
    "in_server",
    "is_token",
    "meeting",
    "send",
    "shared_folder",
]

CONTROL = "TRLCOMPAT_VLLM_CONTROL"
"""The variable that names the folder."""
SERVER = "TRLCOMPAT_VLLM_SERVER"
"""The variable that identifies the processes of one server."""
_TOKEN = re.compile(r"[0-9a-f]{32}")
_CREDENTIALS = struct.Struct("3i")
"""``struct ucred`` of unix(7): the process, its user and its group."""
_LENGTH = struct.Struct("!Q")
_POLL = 0.05
_TIMEOUT = 60.0


class ControlError(RuntimeError):
    """There is no folder that is this user's alone, or nothing was left under a token."""


@functools.cache
def shared_folder() -> Path:
    """The folder of this test process, made with mode 0700 when it is first asked for, and removed with the process.

    Raises:
        OSError: the system refused it.
    """
    folder = Path(tempfile.mkdtemp(prefix="trlcompat-control-"))
    own_folder = OwnFolder(folder, f"{CONTROL}_OWNER={secrets.token_hex(16)}")
    atexit.register(own_folder.remove)
    return folder


def in_server() -> bool:
    """Whether this is a process of a vLLM server, which acts on what comes from a port."""
    return SERVER in os.environ


def is_token(name: object) -> bool:
    """Whether it has the form of a token, which neither a path nor an address has."""
    return isinstance(name, str) and _TOKEN.fullmatch(name) is not None


def check_token(name: object) -> None:
    """
    Raises:
        ControlError: it is none.
    """
    if not is_token(name):
        raise ControlError(f"{name!r} is no token, which are 32 hexadecimal digits")


def announce_meeting() -> str:
    """Make a file at which a trainer and a server can meet.

    Returns:
        The token by which the server is told of it.

    Raises:
        ControlError: there is no folder for it.
    """
    token = secrets.token_hex(16)
    with _opened_folder() as folder:
        # By the folder's descriptor, which was checked: at its path there could be another folder by now.
        os.close(os.open(f"meeting-{token}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600, dir_fd=folder))
    return token


def meeting(token: str) -> Path:
    """The file that was announced under a token.

    Raises:
        ControlError: it is no token, nobody has announced it, or there is no folder.
    """
    check_token(token)
    with _opened_folder() as folder:
        try:
            status = os.stat(f"meeting-{token}", dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            raise ControlError(f"no process of this user has announced a meeting {token}") from None
    if not stat.S_ISREG(status.st_mode):
        raise ControlError(f"what was announced as a meeting {token} is no file")
    return _folder() / f"meeting-{token}"


class Inbox:
    """A Unix socket in the folder at which this process waits for one message.

    Attributes:
        token: names it for :func:`send`.

    Raises:
        ControlError: there is no folder for it.
    """

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _opened_folder() as folder:
                self._listener.bind(_within(folder, self.token))
            self._listener.listen(1)
        except BaseException:
            self._listener.close()
            raise

    def __enter__(self) -> Inbox:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        with contextlib.suppress(ControlError, OSError), _opened_folder() as folder:
            os.unlink(_name(self.token), dir_fd=folder)

    def receive(self, timeout: float, is_given_up: Callable[[], bool] = lambda: False) -> bytes | None:
        """The message; ``None`` once ``is_given_up`` says that none will come.

        Args:
            timeout: in seconds.

        Raises:
            TimeoutError: none came in time.
            PermissionError: it came from a process of another user; nothing of it was read.
            ConnectionError: the sender ended in the middle of it.
        """
        deadline = time.monotonic() + timeout
        while not select.select([self._listener], [], [], _POLL)[0]:
            if is_given_up():
                return None
            if time.monotonic() > deadline:
                raise TimeoutError(f"no message came within {timeout:g} s")
        connection, _ = self._listener.accept()
        with connection:
            connection.settimeout(timeout)
            _check_peer(connection)
            (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
            return bytes(_read(connection, length))


def send(token: str, content: bytes) -> None:
    """Send a message to the process of this user that waits for it under a token.

    Raises:
        ControlError: it is no token, nobody waits under it, or there is no folder.
        PermissionError: a process of another user waits there; nothing was sent.
        OSError: it did not take all of it.
    """
    check_token(token)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT)
        with _opened_folder() as folder:
            try:
                connection.connect(_within(folder, token))
            except (FileNotFoundError, ConnectionRefusedError):
                raise ControlError(f"no process of this user waits for a message under {token}") from None
        _check_peer(connection)
        connection.sendall(_LENGTH.pack(len(content)))
        # The other end has read all of an empty message already, and may have gone.
        if content:
            connection.sendall(content)


def _name(token: str) -> str:
    return f"inbox-{token}"


def _within(folder: int, token: str) -> str:
    """The address of an inbox, by the folder's descriptor: a socket's path has at most 107 bytes, a folder's more."""
    return f"/proc/self/fd/{folder}/{_name(token)}"


def _check_peer(connection: socket.socket) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.getuid():
        raise PermissionError(f"a process of the user with the id {user} is at the other end, not one of {os.getuid()}")


def _read(connection: socket.socket, length: int) -> bytearray:
    content = bytearray(length)
    view, have = memoryview(content), 0
    while have < length:
        count = connection.recv_into(view[have:])
        if not count:
            raise ConnectionError(f"the sender ended after {have} of {length} bytes")
        have += count
    return content


def _folder() -> Path:
    named = os.environ.get(CONTROL, "")
    if not named:
        raise ControlError(
            f"{CONTROL} names no folder: a trainer and its vLLM server on a CPU meet in one that the fixture "
            "vllm_server makes, so the trainer has to run in a rank of this harness, and the server has to be that "
            "fixture's"
        )
    return Path(named)


@contextlib.contextmanager
def _opened_folder() -> Iterator[int]:
    """A descriptor of the folder, which is checked to be this user's alone."""
    path = _folder()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ControlError(f"{path}, which {CONTROL} names, cannot be opened: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise ControlError(
                f"{path}, which {CONTROL} names, is not this user's alone: it belongs to the user with the id "
                f"{status.st_uid}, with mode {stat.S_IMODE(status.st_mode):o}"
            )
        yield descriptor
    finally:
        os.close(descriptor)
