"""Machines meet only where they know the same secret, and nobody else gets in or in the way."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_trlcompat.launch import Cluster, ClusterError
from pytest_trlcompat.launch.cluster import SECRET_VARIABLE
from pytest_trlcompat.launch.environment import base_environment
from pytest_trlcompat.launch.meeting import Board, Visitor

SECRET, OTHER = "a secret of these machines", "a secret of other machines"


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    """Where a board is, for those who know :data:`SECRET`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                Board(listener, SECRET).serve()

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        yield listener.getsockname()
        # A thread that waits in accept() would stay there when the socket is closed, and where the system restarts that
        # call, as after it was frozen, take connections of whichever socket has that number by then.
        listener.shutdown(socket.SHUT_RDWR)
        serving.join()


def visitor(address: tuple[str, int], secret: str = SECRET, timeout: float = 30) -> Visitor:
    return Visitor(address, secret, timeout)


def test_machines_that_know_the_secret_exchange_numbers(address: tuple[str, int]) -> None:
    read: list[int] = []
    reader = threading.Thread(target=lambda: read.append(visitor(address).get("port/1")))
    reader.start()
    visitor(address).set("port/1", 4711)
    reader.join()
    assert read == [4711]
    waiting = threading.Thread(target=visitor(address).gather, args=("here/1", 2))
    waiting.start()
    visitor(address).gather("here/1", 2)
    waiting.join()
    visitor(address).tell("done/1")
    visitor(address).gather("done/1", 2)


def test_another_secret_is_refused_and_told_on_both_sides(address: tuple[str, int]) -> None:
    host, port = address
    with pytest.raises(PermissionError) as caught:
        visitor(address, OTHER).set("port/1", 666)
    wanted = f"machine 0 at {host}:{port} has another secret: set {SECRET_VARIABLE} to the same on every machine"
    assert str(caught.value) == wanted
    with pytest.raises(TimeoutError) as late:
        visitor(address, timeout=1).gather("here/1", 2)
    told = f"1 of 2 machines met at machine 0 at {host}:{port} within 1 s; turned away for another secret: 127.0.0.1"
    assert str(late.value) == told
    with pytest.raises(TimeoutError, match="wrote no 'port/1' within 1 s"):
        visitor(address, timeout=1).get("port/1")


def test_a_board_that_does_not_know_the_secret_is_refused(address: tuple[str, int]) -> None:
    """Somebody else who listens where machine 0 should, and accepts whatever he is answered."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def welcome() -> None:
            channel, _ = listener.accept()
            with channel:
                for message in (b"#CHALLENGE#" + b"x" * 20, b"#WELCOME#", b"any digest"):
                    channel.sendall(len(message).to_bytes(4, "big") + message)
                    channel.recv(4096)

        threading.Thread(target=welcome, daemon=True).start()
        with pytest.raises(PermissionError, match="has another secret"):
            visitor(listener.getsockname()).get("port/1")


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.write_text, (self._path, "it was unpickled"))


def test_strangers_neither_run_code_nor_keep_others_waiting(address: tuple[str, int], tmp_path: Path) -> None:
    trap = pickle.dumps(Trap(tmp_path / "trap"))
    messages = [b"", b"GET / HTTP/1.1\r\n\r\n", len(trap).to_bytes(4, "big") + trap, b"\xff" * 64]
    strangers = [socket.create_connection(address) for _ in messages]
    for stranger, message in zip(strangers, messages, strict=True):
        stranger.sendall(message)
    visitor(address).set("port/1", 5)
    assert visitor(address).get("port/1") == 5
    for stranger in strangers:
        stranger.close()
    assert not (tmp_path / "trap").exists()


def test_a_board_that_is_not_there_yet_is_waited_for() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()
    with pytest.raises(TimeoutError, match=rf"machine 0 at 127.0.0.1:{address[1]} was not there within 1 s"):
        visitor(address, timeout=1).get("port/1")


@pytest.mark.parametrize("secret", [None, "", "short"])
def test_machines_without_a_secret_are_refused(secret: str | None) -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster(2, 0, "10.0.0.1:29400", secret)
    wanted = f"2 machines need a secret of 16 characters or more, the same on each, as {SECRET_VARIABLE}; make one by: "
    assert str(caught.value).startswith(wanted)


def test_the_secret_is_not_shown_and_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    cluster = Cluster(2, 0, "10.0.0.1:29400", SECRET)
    assert SECRET not in repr(cluster)
    assert SECRET not in base_environment("cpu", cluster).values()
