"""The list of listening sockets, by which other tests judge launches, misses none."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest

from . import listening
from .listening import family, inodes, listeners, watching


@pytest.mark.parametrize(
    ("kind", "address", "protected"),
    [
        (socket.AF_INET, "127.0.0.1", True),
        (socket.AF_INET, "127.8.9.10", True),
        (socket.AF_INET, "0.0.0.0", False),
        (socket.AF_INET6, "::1", True),
        (socket.AF_INET6, "::", False),
        (socket.AF_INET6, "::ffff:127.0.0.1", True),
    ],
)
@pytest.mark.parametrize("protocol", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_internet_sockets(kind: int, address: str, protected: bool, protocol: socket.SocketKind) -> None:
    with socket.socket(kind, protocol) as one:
        try:
            one.bind((address, 0))
        except OSError as error:
            pytest.skip(f"this machine has no {address}: {error}")
        if protocol == socket.SOCK_STREAM:
            one.listen()
        name = {socket.SOCK_STREAM: "tcp", socket.SOCK_DGRAM: "udp"}[protocol] + (
            "6" if kind == socket.AF_INET6 else ""
        )
        (found,) = (each for each in listeners([os.getpid()]) if each.port == one.getsockname()[1])
        assert str(os.fstat(one.fileno()).st_ino) in inodes()
    assert (found.kind, ip_address(found.address), found.protected) == (name, ip_address(address), protected)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that everybody can enter."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if any(each.stat().st_mode & 0o011 == 0 for each in folder.parents):
            pytest.skip(f"nobody else can enter {folder.parent}")
        folder.chmod(0o755)
        yield folder


def test_unix_sockets(shared: Path) -> None:
    open_folder, closed_folder = shared / "open", shared / "closed"
    open_folder.mkdir(mode=0o755)
    closed_folder.mkdir(mode=0o700)
    names = [str(open_folder / "s"), str(closed_folder / "s"), f"\0trlcompat-{os.getpid()}"]
    sockets = [socket.socket(socket.AF_UNIX) for _ in names]
    for each, name in zip(sockets, names, strict=True):
        each.bind(name)
        each.listen()
    found = {each.address: each.protected for each in listeners([os.getpid()]) if each.kind == "unix"}
    assert {str(os.fstat(each.fileno()).st_ino) for each in sockets} <= inodes()
    for each in sockets:
        each.close()
    assert [found[name.replace("\0", "@")] for name in names] == [False, True, False]


def test_a_socket_is_listed_by_netlink_and_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(family: int) -> set[str]:
        raise PermissionError

    with socket.create_server(("127.0.0.1", 0)) as server:
        inode = str(os.fstat(server.fileno()).st_ino)
        assert inode in listening._tcp_inodes(socket.AF_INET)
        monkeypatch.setattr(listening, "_tcp_inodes", refused)
        assert inode in inodes()
    assert inode not in inodes()


def test_descendants_are_watched() -> None:
    listen = "import socket, time; it = socket.create_server(('0.0.0.0', 0)); print(it.getsockname()[1], flush=True)"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {listen + '; time.sleep(600)'!r}])"
    with watching(os.getpid()) as seen:
        shell = subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True)
        assert shell.stdout is not None
        port = int(shell.stdout.readline())
        pids = family(shell.pid)
        deadline = time.monotonic() + 30
        while not any(each.port == port for each in tuple(seen)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    for pid in pids:
        os.kill(pid, 9)
    shell.communicate()
    (found,) = (each for each in seen if each.port == port)
    assert len(pids) == 2
    assert (found.pid, found.protected) == (pids[1], False)
