"""What ranks and a vLLM server leave for each other: who finds it, and what a request from a port cannot say."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_trlcompat.inference import control
from pytest_trlcompat.inference.control import ControlError, Inbox

STRANGER = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / ("control" * 20)  # longer than the path of a socket may be
    found.mkdir(mode=0o700)
    monkeypatch.setenv(control.CONTROL, str(found))
    return found


def receiving(inbox: Inbox) -> tuple[threading.Thread, list[object]]:
    result: list[object] = []

    def receive() -> None:
        try:
            result.append(inbox.receive(20))
        except OSError as error:
            result.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    return thread, result


@pytest.mark.parametrize("content", [b"", b"x", os.urandom(3_000_000)], ids=["nothing", "one", "more than a buffer"])
def test_a_message_arrives_whole(folder: Path, content: bytes) -> None:
    with Inbox() as inbox:
        thread, result = receiving(inbox)
        control.send(inbox.token, content)
        thread.join()
        assert result == [content]
    assert list(folder.iterdir()) == []


def test_one_that_is_given_up_is_not_waited_for(folder: Path) -> None:
    with Inbox() as inbox:
        assert inbox.receive(60, lambda: True) is None
        with pytest.raises(TimeoutError, match="no message came within 0 s"):
            inbox.receive(0)


@pytest.mark.parametrize("act", [control.meeting, lambda token: control.send(token, b"x")], ids=["meeting", "message"])
@pytest.mark.parametrize(
    "name",
    ["", "10.1.2.3", "{folder}/written", "../written", "A" * 32, "0" * 31, "0" * 33, "0" * 32 + "\n", "0/" + "0" * 30],
)
def test_what_is_no_token_names_no_file(folder: Path, act: Callable[[str], object], name: str) -> None:
    name = name.format(folder=folder)
    assert not control.is_token(name)
    with pytest.raises(ControlError, match="is no token"):
        act(name)
    assert list(folder.parent.rglob("written")) == []


@pytest.mark.parametrize("act", [control.meeting, lambda token: control.send(token, b"x")], ids=["meeting", "message"])
def test_a_token_under_which_nothing_was_left_makes_nothing(folder: Path, act: Callable[[str], object]) -> None:
    with pytest.raises(ControlError, match="no process of this user"):
        act("0" * 32)
    assert list(folder.iterdir()) == []


def test_a_meeting_is_a_file_that_was_announced(folder: Path) -> None:
    token = control.announce_meeting()
    assert control.is_token(token)
    assert control.meeting(token) == folder / f"meeting-{token}"
    assert stat.S_IMODE((folder / f"meeting-{token}").stat().st_mode) == 0o600
    (folder / f"meeting-{'1' * 32}").symlink_to(folder.parent / "elsewhere")
    with pytest.raises(ControlError, match="is no file"):
        control.meeting("1" * 32)


@pytest.mark.parametrize("act", [control.announce_meeting, Inbox, lambda: control.send("0" * 32, b"")])
def test_a_folder_that_others_can_enter_is_not_used(folder: Path, act: Callable[[], object]) -> None:
    folder.chmod(0o750)
    with pytest.raises(ControlError, match="is not this user's alone: it belongs to the user with the id .* mode 750"):
        act()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("act", [control.announce_meeting, Inbox, lambda: control.send("0" * 32, b"")])
def test_without_a_folder_there_is_one_message(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    monkeypatch.delenv(control.CONTROL, raising=False)
    with pytest.raises(ControlError, match="the trainer has to run in a rank of this harness"):
        act()
    monkeypatch.setenv(control.CONTROL, "/nowhere/at/all")
    with pytest.raises(ControlError, match="cannot be opened: No such file"):
        act()


@needs_root
def test_a_folder_of_another_user_is_not_used(folder: Path) -> None:
    os.chown(folder, STRANGER, STRANGER)
    with pytest.raises(ControlError, match=f"belongs to the user with the id {STRANGER}"):
        control.announce_meeting()


@needs_root
def test_another_user_can_neither_send_nor_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the folder let it in, which it does not: here the test lets it."""
    with Inbox() as inbox:
        path = f"{folder}/inbox-{inbox.token}"
        os.chmod(path, 0o666)
        for parent in (folder, *folder.parents[:4]):
            if parent.stat().st_uid == os.getuid() and len(parent.parts) > 2:
                parent.chmod(0o711)
        code = (
            f"import os, socket\nos.setgid({STRANGER}); os.setuid({STRANGER})\nos.chdir({str(folder)!r})\n"
            f"s = socket.socket(socket.AF_UNIX); s.connect({f'inbox-{inbox.token}'!r}); s.sendall(b'0' * 8); s.recv(1)"
        )
        thread, result = receiving(inbox)
        subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
        thread.join()
    (error,) = result
    assert isinstance(error, PermissionError)
    assert f"a process of the user with the id {STRANGER} is at the other end" in str(error)


def test_the_folder_of_a_test_process_is_its_own_and_goes_with_it(tmp_path: Path) -> None:
    code = (
        "from pytest_trlcompat.inference.control import shared_folder\n"
        "assert shared_folder() == shared_folder(); print(shared_folder(), oct(shared_folder().stat().st_mode & 0o777))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    path, mode = done.stdout.split()
    assert Path(path).parent == tmp_path
    assert mode == "0o700"
    assert not Path(path).exists()


def test_a_socket_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        code = (
            "import socket, sys; from pytest_trlcompat.inference.serving import use_socket\n"
            f"use_socket({held.fileno()}, {port})\n"
            f"own = socket.socket(); own.bind(('127.0.0.1', {port})); own.listen(); print(own.getsockname()[1])\n"
            "other = socket.socket(); other.bind(('127.0.0.1', 0)); print(other.getsockname()[1])\n"
            "unix = socket.socket(socket.AF_UNIX); unix.bind(sys.argv[1]); print(unix.getsockname())"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "u")],
            pass_fds=[held.fileno()],
            capture_output=True,
            text=True,
            check=True,
        )
    ours, other, unix = done.stdout.split()
    assert int(ours) == port != int(other)
    assert unix == str(tmp_path / "u")
