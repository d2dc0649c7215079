"""``launch`` without the stack: new processes, root causes, timeouts, and nothing left behind.

What needs torch is in tests/stack/test_launch.py.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.launch import Launcher, LaunchError, LaunchWarning, StrategyError
from pytest_trlcompat.launch.protocol import Buffer

GREETING = "hello"


@pytest.fixture(scope="module")
def launch() -> Iterator[Launcher]:
    with Launcher(device="cpu", timeout=20) as launcher:
        yield launcher


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "zombie" not in Path(f"/proc/{pid}/status").read_text()


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


def return_arguments(*args: object, **kwargs: object) -> object:
    print(GREETING)  # a global of the test module, which goes along by value
    print("to stderr", file=sys.stderr)
    return args, kwargs, os.getpid()


def test_value_output_and_a_fresh_process(launch: Launcher) -> None:
    first = launch(return_arguments, 1, strategy="single", b=[2]).ranks[0]
    second = launch(return_arguments, strategy="single").ranks[0]
    assert first.value[:2] == ((1,), {"b": [2]})
    assert first.value[2] not in (second.value[2], os.getpid())
    assert (first.stdout, first.stderr) == ("hello\n", "to stderr\n")
    assert first.ok
    assert first.exit_status == 0
    assert 0 < first.seconds < 20
    assert first.peak_bytes > 1 << 20


def test_closures_and_lambdas(launch: Launcher) -> None:
    number = 41
    assert launch(lambda: number + 1, strategy="single").values == [42]


def test_environment_directory_and_path_are_the_tests(
    launch: Launcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "trlcompat_local_module.py").write_text("NUMBER = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRLCOMPAT_TEST_OUTER", "a")

    def look() -> tuple[str | None, str | None, str, int, str]:
        import importlib
        import random

        local = importlib.import_module("trlcompat_local_module")
        outer, inner = os.environ.get("TRLCOMPAT_TEST_OUTER"), os.environ.get("TRLCOMPAT_TEST_INNER")
        os.environ["TRLCOMPAT_TEST_LEAK"] = "1"
        return outer, inner, os.getcwd(), local.NUMBER, f"{random.random():.6f}"

    answer = launch(look, strategy="single", env={"TRLCOMPAT_TEST_INNER": "b"}).values[0]
    assert answer == ("a", "b", str(tmp_path), 7, "0.844422")  # random.seed(0)
    monkeypatch.delenv("TRLCOMPAT_TEST_OUTER")
    assert launch(look, strategy="single").values[0][:2] == (None, None)
    assert launch(lambda: os.environ.get("TRLCOMPAT_TEST_LEAK"), strategy="single").values == [None]


def test_a_variable_that_the_server_started_with_can_be_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRLCOMPAT_TEST_EARLY", "a")
    with Launcher(device="cpu") as launcher:
        assert launcher(lambda: os.environ.get("TRLCOMPAT_TEST_EARLY"), strategy="single").values == ["a"]
        monkeypatch.delenv("TRLCOMPAT_TEST_EARLY")
        assert launcher(lambda: os.environ.get("TRLCOMPAT_TEST_EARLY"), strategy="single").values == [None]


def raise_with_output() -> None:
    print("before the end")
    raise LookupError("no such thing")


def test_an_exception_is_the_launchs_error(launch: Launcher) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(raise_with_output, strategy="single")
    text = str(caught.value)
    assert "launch of raise_with_output under single on 1 rank(s), device cpu failed" in text
    assert "first observed failure: rank 0 raised LookupError" in text
    assert "LookupError: no such thing" in text
    assert "before the end" in text
    failure = caught.value.failure
    assert failure is not None
    assert failure.mro == ("LookupError", "Exception", "BaseException", "object")


def test_check_false_returns_the_failure(launch: Launcher) -> None:
    result = launch(raise_with_output, strategy="single", check=False)
    assert not result.ok
    assert result.root_cause is result.ranks[0]


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (lambda: sys.exit(3), "rank 0 raised SystemExit"),
        (lambda: os._exit(0), "rank 0 exited with status 0 before its function returned"),
        (lambda: os._exit(7), "rank 0 exited with status 7"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 0 was killed by SIGKILL (often: out of memory)"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "rank 0 was killed by SIGSEGV"),
        (lambda: (letter for letter in "ab"), "that cannot be pickled"),
    ],
    ids=["sys.exit", "os._exit(0)", "os._exit(7)", "SIGKILL", "SIGSEGV", "unpicklable"],
)
def test_every_other_end_is_a_failure_with_a_name(launch: Launcher, how: object, text: str) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(how, strategy="single")  # type: ignore[arg-type]
    assert text in str(caught.value)
    assert launch(lambda: "next", strategy="single").values == ["next"]


def test_a_timeout_ends_the_launch_and_shows_where_it_was(launch: Launcher) -> None:
    def sleep_for_ever() -> None:
        while True:
            time.sleep(0.01)

    started = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        launch(sleep_for_ever, strategy="single", timeout=0.5)
    assert time.monotonic() - started < 15
    assert caught.value.result is not None
    assert caught.value.result.timed_out
    assert "timed out" in str(caught.value)
    assert "the launch's timeout of 0.5 s passed" in str(caught.value)
    assert "in sleep_for_ever" in str(caught.value)
    assert launch(lambda: "next", strategy="single").values == ["next"]


def test_what_a_rank_leaves_behind_is_ended(launch: Launcher) -> None:
    def leave_grandchild() -> int:
        return subprocess.Popen(["sleep", "600"]).pid

    wait_until_gone(launch(leave_grandchild, strategy="single").values[0])


def test_a_hundred_megabytes_of_output_are_cut_in_the_middle(launch: Launcher) -> None:
    def talk() -> None:
        print("the start")
        for _ in range(100):
            sys.stdout.write("x" * ((1 << 20) - 1) + "\n")
        print("the end")

    output = launch(talk, strategy="single").ranks[0].stdout
    assert len(output) < 400_000
    assert output.startswith("the start\n")
    assert f"[... {(100 << 20) + 18 - (1 << 16) - (1 << 18)} bytes left out ...]" in output
    assert output.endswith("the end\n")


def test_an_endless_loop_in_native_code_ends_with_the_timeout(launch: Launcher) -> None:
    def loop_in_native_code() -> None:
        # One call that never comes back and never lets go of the interpreter's lock, so no Python handler could run.
        any(iter(int, 1))

    with pytest.raises(LaunchError) as caught:
        launch(loop_in_native_code, strategy="single", timeout=0.5)
    assert "it was in loop_in_native_code (launch/test_launch.py:" in str(caught.value)
    assert launch(lambda: "next", strategy="single").values == ["next"]


class Unpicklable(Exception):
    """An exception that cannot be sent, and whose text cannot be had either."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise ZeroDivisionError


def raise_unpicklable() -> None:
    raise Unpicklable


def test_an_exception_that_cannot_be_pickled_is_reported(launch: Launcher) -> None:
    with pytest.raises(LaunchError, match="rank 0 raised Unpicklable") as caught:
        launch(raise_unpicklable, strategy="single")
    assert caught.value.failure is not None
    assert caught.value.failure.message == "<Unpicklable whose text cannot be had: ZeroDivisionError>"


def test_temporary_files_of_ranks_last_as_long_as_the_launcher() -> None:
    def leave_file() -> str:
        descriptor, name = tempfile.mkstemp()
        os.close(descriptor)
        return name

    with Launcher(device="cpu") as launcher:
        name = launcher(leave_file, strategy="single").values[0]
        assert Path(name).exists()
    assert not Path(name).parent.exists()


def test_a_full_disk_is_reported(launch: Launcher, tmp_path: Path) -> None:
    """A limit on file sizes acts as a full disk: a rank whose output does not fit must not count as a success."""

    def print_beyond_the_limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        print("x" * 10_000)

    with pytest.raises(LaunchError, match="rank 0 raised OSError") as caught:
        launch(print_beyond_the_limit, strategy="single")
    assert "File too large" in str(caught.value)
    assert launch(lambda: "next", strategy="single").values == ["next"]


def test_nothing_is_left_in_the_test_process_or_the_server(launch: Launcher) -> None:
    def server_state() -> tuple[int, int, list[str]]:
        server = os.getppid()
        # Until the server sleeps, it may not have closed what it needed only for the fork of this rank.
        while Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.01)
        threads = len(os.listdir(f"/proc/{server}/task"))
        return len(os.listdir(f"/proc/{server}/fd")), threads, sorted(os.listdir("/dev/shm"))

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
        launch(return_arguments, strategy="single")
        launch(raise_with_output, strategy="single", check=False)
    assert own_state() == before
    assert launch(server_state, strategy="single").values[0] == server_before


def test_a_killed_server_is_reported_and_replaced() -> None:
    with Launcher(device="cpu") as launcher:
        server = launcher(os.getppid, strategy="single").values[0]
        os.kill(server, signal.SIGKILL)
        wait_until_gone(server)
        with pytest.warns(LaunchWarning, match="the launch server was killed by SIGKILL .* a new one is started"):
            assert launcher(os.getppid, strategy="single").values[0] != server


def test_a_server_killed_in_the_middle_takes_its_ranks_along(tmp_path: Path) -> None:
    def kill_server_and_wait(file: str) -> None:
        Path(file).write_text(str(os.getpid()))
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    with Launcher(device="cpu") as launcher:
        with pytest.raises(LaunchError, match="the launch server was killed by SIGKILL"):
            launcher(kill_server_and_wait, str(tmp_path / "pid"), strategy="single")
        wait_until_gone(int((tmp_path / "pid").read_text()))


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


def test_a_stack_that_hangs_when_it_is_imported_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = tmp_path / "pid"
    (tmp_path / "torch.py").write_text(
        f"import os, time\nopen({str(where)!r}, 'w').write(str(os.getpid()))\nprint('importing')\ntime.sleep(600)\n"
    )
    with Launcher(device="cpu") as launcher, monkeypatch.context() as patched:
        patched.syspath_prepend(tmp_path)
        patched.setattr("pytest_trlcompat.launch.warm._START_TIMEOUT", 2.0)
        with pytest.raises(LaunchError, match="the launch server did not start within 2 s"):
            launcher(os.getppid, strategy="single")
        wait_until_gone(int(where.read_text()))
        patched.undo()
        assert launcher(os.getppid, strategy="single").values[0] != int(where.read_text())


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


def test_ctrl_c_in_a_launch_leaves_nothing_behind(tmp_path: Path) -> None:
    process = begin_in_a_script(tmp_path)
    process.send_signal(signal.SIGINT)
    everything_ends(process, tmp_path)


def test_a_second_ctrl_c_does_not_leave_anything_behind(tmp_path: Path) -> None:
    # Stopped, so that the server does not leave by itself.
    process = begin_in_a_script(tmp_path, "os.kill(os.getppid(), signal.SIGSTOP)")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    everything_ends(process, tmp_path)


def test_two_launchers_do_not_meet() -> None:
    with Launcher(device="cpu") as one, Launcher(device="cpu") as other:
        assert one(os.getppid, strategy="single").values != other(os.getppid, strategy="single").values


def test_what_cannot_be_sent_is_refused_before_a_server_starts() -> None:
    launcher = Launcher(device="cpu")
    with pytest.raises(LaunchError, match="cannot be sent to the ranks"):
        launcher(lambda: None, (letter for letter in "ab"), strategy="single")
    assert not launcher._servers


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"strategy": "zero4"}, StrategyError, "unknown strategy 'zero4'"),
        ({"strategy": "ddp", "world_size": 9}, ValueError, "world_size must be 1 to 8, not 9"),
        ({"strategy": "single", "world_size": 2}, ValueError, "strategy 'single' has one rank"),
    ],
)
def test_bad_requests_are_refused(
    launch: Launcher, arguments: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        launch(lambda: None, **arguments)  # type: ignore[arg-type]


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown device 'tpu'; known are software, cuda, cpu"):
        Launcher(device="tpu")


def test_messages_survive_any_cutting() -> None:
    import pickle
    import struct

    messages = [{"a": 1}, "b" * 3000, None]
    raw = b"".join(struct.pack("!Q", len(pickle.dumps(m))) + pickle.dumps(m) for m in messages)
    for step in (1, 7, len(raw)):
        buffer = Buffer()
        assert [m for start in range(0, len(raw), step) for m in buffer.feed(raw[start : start + step])] == messages
