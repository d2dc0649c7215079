"""``launch`` without the stack: new processes, root causes, timeouts, refusals.

What needs torch is in tests/stack/test_launch.py.
"""

from __future__ import annotations

import itertools
import os
import random
import resource
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pytest_trlcompat.launch import Launcher, LaunchError, StrategyError
from pytest_trlcompat.launch.protocol import Buffer

from .processes import raise_with_output, wait_until_gone

GREETING = "hello"


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
        pytest.param(
            lambda: sys.exit(3),
            "rank 0 raised SystemExit",
            marks=pytest.mark.fault("A rank calls `sys.exit`.", "The launch fails with SystemExit and its traceback."),
            id="sys.exit",
        ),
        pytest.param(
            lambda: os._exit(0),
            "rank 0 exited with status 0 before its function returned",
            marks=pytest.mark.fault("A rank calls `os._exit(0)`.", "The launch fails: the function had not returned."),
            id="os._exit(0)",
        ),
        pytest.param(
            lambda: os._exit(7),
            "rank 0 exited with status 7",
            marks=pytest.mark.fault("A rank calls `os._exit(7)`.", "The launch fails, and names rank and status."),
            id="os._exit(7)",
        ),
        pytest.param(
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            "rank 0 was killed by SIGKILL (often: out of memory)",
            marks=pytest.mark.fault("A rank is killed by SIGKILL.", "The launch fails, and names rank and signal."),
            id="SIGKILL",
        ),
        pytest.param(
            lambda: os.kill(os.getpid(), signal.SIGSEGV),
            "rank 0 was killed by SIGSEGV",
            marks=pytest.mark.fault("A rank is killed by SIGSEGV.", "The launch fails, and names rank and signal."),
            id="SIGSEGV",
        ),
        pytest.param(
            lambda: (letter for letter in "ab"),
            "that cannot be pickled",
            marks=pytest.mark.fault("A result cannot be pickled.", "The launch fails, and names the result's class."),
            id="unpicklable",
        ),
    ],
)
def test_every_other_end_is_a_failure_with_a_name(launch: Launcher, how: object, text: str) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(how, strategy="single")  # type: ignore[arg-type]
    assert text in str(caught.value)
    assert launch(lambda: "next", strategy="single").values == ["next"]


@pytest.mark.fault("A rank never returns.", "The launch ends at its timeout, and shows in which function the rank was.")
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


@pytest.mark.fault(
    "A rank prints 200 MB.",
    "The result holds the first 64 KiB and the last 256 KiB, and says how much is left out.",
)
def test_two_hundred_megabytes_of_output_are_cut_in_the_middle(launch: Launcher) -> None:
    def talk() -> None:
        print("the start")
        for _ in range(200):
            sys.stdout.write("x" * ((1 << 20) - 1) + "\n")
        print("the end")

    output = launch(talk, strategy="single").ranks[0].stdout
    assert len(output) < 400_000
    assert output.startswith("the start\n")
    assert f"[... {(200 << 20) + 18 - (1 << 16) - (1 << 18)} bytes left out ...]" in output
    assert output.endswith("the end\n")


@pytest.mark.fault(
    "A rank never returns from native code, and keeps the interpreter's lock.",
    "The launch ends at its timeout, and shows the Python function that called it.",
)
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


@pytest.mark.fault(
    "A rank raises an exception that can be neither pickled nor printed.",
    "The launch names its class, and what went wrong with its text.",
)
def test_an_exception_that_cannot_be_pickled_is_reported(launch: Launcher) -> None:
    with pytest.raises(LaunchError, match="rank 0 raised Unpicklable") as caught:
        launch(raise_unpicklable, strategy="single")
    assert caught.value.failure is not None
    assert caught.value.failure.message == "<Unpicklable whose text cannot be had: ZeroDivisionError>"


@pytest.mark.fault(
    "A rank's output does not fit on the disk.", "The launch fails with the OSError, though the rank returned."
)
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


@pytest.mark.fault(
    "The import of the stack hangs.",
    "The server is ended after the time for its start; the next launch starts another.",
)
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


def test_launches_from_several_threads_wait_for_each_other(launch: Launcher) -> None:
    def take_a_moment(number: int) -> tuple[int, float, float]:
        started = time.monotonic()
        time.sleep(0.2)
        return number, started, time.monotonic()

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda number: launch(take_a_moment, number, strategy="single").values[0], range(4)))
    assert [number for number, *_ in results] == [0, 1, 2, 3]
    turns = sorted((started, ended) for _, started, ended in results)
    assert all(ended < started for (_, ended), (started, _) in itertools.pairwise(turns))


def test_two_launchers_do_not_meet() -> None:
    with Launcher(device="cpu") as one, Launcher(device="cpu") as other:
        assert one(os.getppid, strategy="single").values != other(os.getppid, strategy="single").values


@pytest.mark.fault(
    "An argument of the function cannot be pickled.",
    "The launch is refused with the reason, before a server is started.",
)
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
