"""Nothing is left behind, however a launch, a rank, the server or the program ends; without the stack."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.launch import Launcher, LaunchError, LaunchWarning

from .processes import open_in_server, raise_with_output, wait_until_gone


@pytest.mark.fault("A rank starts another process and leaves it.", "It is ended with the launch.")
def test_what_a_rank_leaves_behind_is_ended(launch: Launcher) -> None:
    def leave_grandchild() -> int:
        return subprocess.Popen(["sleep", "600"]).pid

    wait_until_gone(launch(leave_grandchild, strategy="single").values[0])


def test_temporary_files_of_ranks_last_as_long_as_the_launcher() -> None:
    def leave_file() -> str:
        descriptor, name = tempfile.mkstemp()
        os.close(descriptor)
        return name

    with Launcher(device="cpu") as launcher:
        name = launcher(leave_file, strategy="single").values[0]
        assert Path(name).exists()
    assert not Path(name).parent.exists()


def test_nothing_is_left_in_the_test_process_or_the_server(launch: Launcher) -> None:
    def server_state() -> tuple[int, int, list[str]]:
        server = os.getppid()
        opened = open_in_server(server)
        return opened, len(os.listdir(f"/proc/{server}/task")), sorted(os.listdir("/dev/shm"))

    def own_state() -> tuple[object, ...]:
        return (
            dict(os.environ),
            random.getstate(),
            threading.active_count(),
            os.getcwd(),
            list(sys.path),
            signal.getsignal(signal.SIGINT),
        )

    launch(lambda: None, strategy="single")
    before, server_before = own_state(), launch(server_state, strategy="single").values[0]
    for _ in range(10):
        launch(print, "to stdout", strategy="single")
        launch(raise_with_output, strategy="single", check=False)
    assert own_state() == before
    assert launch(server_state, strategy="single").values[0] == server_before


@pytest.mark.fault(
    "The server is killed by SIGKILL between two launches.",
    "A warning says so, and the next launch starts another server.",
)
def test_a_killed_server_is_reported_and_replaced() -> None:
    with Launcher(device="cpu") as launcher:
        server = launcher(os.getppid, strategy="single").values[0]
        os.kill(server, signal.SIGKILL)
        wait_until_gone(server)
        with pytest.warns(LaunchWarning, match="the launch server was killed by SIGKILL .* a new one is started"):
            assert launcher(os.getppid, strategy="single").values[0] != server


@pytest.mark.fault(
    "The server is killed by SIGKILL while a launch runs.",
    "The launch fails and says so; the ranks end with the server.",
)
def test_a_server_killed_in_the_middle_takes_its_ranks_along(tmp_path: Path) -> None:
    def kill_server_and_wait(file: str) -> None:
        Path(file).write_text(str(os.getpid()))
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    with Launcher(device="cpu") as launcher:
        with pytest.raises(LaunchError, match="the launch server was killed by SIGKILL"):
            launcher(kill_server_and_wait, str(tmp_path / "pid"), strategy="single")
        wait_until_gone(int((tmp_path / "pid").read_text()))


@pytest.mark.fault(
    "A rank leaves a daemon: its parent is gone, and it leads a session.",
    "It is ended with the launch.",
)
def test_a_grandchild_in_a_session_of_its_own_is_ended(launch: Launcher) -> None:
    def leave_daemon() -> int:
        # Twice removed: its parent is gone as well, and it leads a session.
        code = (
            "import subprocess as s; "
            "print(s.Popen(['sleep', '600'], stdout=s.DEVNULL, stderr=s.DEVNULL, start_new_session=True).pid)"
        )
        return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)

    wait_until_gone(launch(leave_daemon, strategy="single").values[0])


@pytest.mark.parametrize("end", ["returned", "killed"])
def test_semaphores_of_processes_that_are_not_forked_are_removed(launch: Launcher, tmp_path: Path, end: str) -> None:
    def lock(end: str) -> None:
        import multiprocessing

        context = multiprocessing.get_context("spawn")
        made: Any = context.Lock()
        context.kept = made  # type: ignore[attr-defined]
        name = Path("/dev/shm") / f"sem.{made._semlock.name.removeprefix('/')}"
        (tmp_path / "name").write_text(f"{name} {name.exists()}")
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)

    launch(lock, end, strategy="single", check=False)
    name, existed = (tmp_path / "name").read_text().split()
    assert existed == "True"
    assert not Path(name).exists()


@pytest.mark.fault(
    "The server is killed by SIGKILL while a daemon of a rank runs.",
    "The daemon is found by its environment, and ended.",
)
def test_a_killed_server_takes_grandchildren_along(tmp_path: Path) -> None:
    def leave_daemon_and_kill_server(file: str) -> None:
        pid = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
        Path(file).write_text(str(pid))
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    with Launcher(device="cpu") as launcher:
        with pytest.raises(LaunchError, match="the launch server was killed by SIGKILL"):
            launcher(leave_daemon_and_kill_server, str(tmp_path / "pid"), strategy="single")
        wait_until_gone(int((tmp_path / "pid").read_text()))


def test_closing_ends_the_server() -> None:
    with Launcher(device="cpu") as launcher:
        server = launcher(os.getppid, strategy="single").values[0]
    wait_until_gone(server)


def test_descriptors_do_not_grow(launch: Launcher) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    inside = launch(count, strategy="single").values[0]
    outside = count()
    for _ in range(20):
        launch(lambda: None, strategy="single")
        launch(raise_with_output, strategy="single", check=False)
    assert count() == outside
    assert launch(count, strategy="single").values[0] == inside


def begin_in_a_script(tmp_path: Path, *lines: str) -> subprocess.Popen[str]:
    """A program whose rank runs ``lines``, then sleeps; it has begun, and the pids of rank and server lie in a file."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, time\n"
        "from pytest_trlcompat.launch import Launcher\n"
        "def body():\n"
        f"    open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{os.getppid()}}')\n"
        + "".join(f"    {line}\n" for line in lines)
        + "    time.sleep(600)\n"
        "with Launcher(device='cpu') as launch:\n"
        "    launch(body, strategy='single')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, str(script)], env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    return process


def everything_ends(process: subprocess.Popen[str], tmp_path: Path) -> None:
    _, errors = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    for pid in (tmp_path / "pids").read_text().split():
        wait_until_gone(int(pid))


@pytest.mark.fault("Ctrl-C while a launch runs.", "KeyboardInterrupt is raised; server and ranks end.")
def test_ctrl_c_in_a_launch_leaves_nothing_behind(tmp_path: Path) -> None:
    process = begin_in_a_script(tmp_path)
    process.send_signal(signal.SIGINT)
    everything_ends(process, tmp_path)


@pytest.mark.fault(
    "A second Ctrl-C while a stopped server is being ended.",
    "The server and its ranks are killed nevertheless.",
)
def test_a_second_ctrl_c_does_not_leave_anything_behind(tmp_path: Path) -> None:
    # Stopped, so that the server does not leave by itself.
    process = begin_in_a_script(tmp_path, "os.kill(os.getppid(), signal.SIGSTOP)")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    everything_ends(process, tmp_path)
