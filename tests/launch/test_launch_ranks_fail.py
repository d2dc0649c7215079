"""What a rank can do to itself, to its connection and to its server, at each stage of a launch; without the stack.

What ranks do to each other is in tests/stack/test_launch_faults.py and test_launch_signals.py.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.launch import Launcher, LaunchError, LaunchResult, protocol, warm

from .processes import output_of, program, wait_until_gone


def fail(launch: Launcher, function: Callable[..., Any], *args: Any, timeout: float = 20.0) -> LaunchResult:
    """A launch that must fail, after which the next one must work."""
    with pytest.raises(LaunchError) as caught:
        launch(function, *args, strategy="single", timeout=timeout)
    assert launch(lambda: "next", strategy="single").values == ["next"]
    assert caught.value.result is not None
    assert caught.value.result.describe() == str(caught.value)
    return caught.value.result


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(
            "before",
            marks=pytest.mark.fault(
                "A rank is stopped by SIGSTOP before it does anything.",
                "The launch ends at its timeout, and says that the rank was stopped.",
            ),
        ),
        pytest.param(
            "sending",
            marks=pytest.mark.fault(
                "A rank is stopped by SIGSTOP while it sends its result.",
                "The launch ends at its timeout, and says that the rank was stopped.",
            ),
        ),
        pytest.param(
            "after",
            marks=pytest.mark.fault(
                "A rank is stopped by SIGSTOP after it has sent its result.",
                "The launch ends at its timeout, and says that the rank was stopped.",
            ),
        ),
    ],
)
def test_a_stopped_rank(launch: Launcher, stage: str) -> None:
    result = fail(launch, be_hit, stage, signal.SIGSTOP, timeout=1.0)
    assert result.timed_out
    assert result.ranks[0].describe().endswith("the launch's timeout of 1 s passed; it was stopped by a signal")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
@pytest.mark.parametrize(
    "stage",
    [
        "before",
        pytest.param(
            "sending",
            marks=pytest.mark.fault(
                "A rank is killed while it sends its result.", "The launch fails, and names the rank and the signal."
            ),
        ),
        pytest.param(
            "after",
            marks=pytest.mark.fault(
                "A rank is killed after it has sent its result, before it has left.",
                "The launch fails, and names the rank and the signal.",
            ),
        ),
    ],
)
def test_a_killed_rank(launch: Launcher, stage: str, number: signal.Signals) -> None:
    result = fail(launch, be_hit, stage, number)
    assert result.ranks[0].exit_status == -number
    assert f"first observed failure: rank 0 was killed by {number.name}" in result.describe()


def be_hit(stage: str, number: int) -> bytes:
    """The rank sends a signal to itself at a stage of the launch: amidst 32 MiB that it sends, or before, or after."""
    from pytest_trlcompat.launch import protocol

    send = protocol.send

    class Torn:
        def __init__(self, channel: Any) -> None:
            self.channel = channel

        def sendall(self, data: bytes) -> None:
            if len(data) > 1 << 20:
                self.channel.sendall(data[: 1 << 20])
                os.kill(os.getpid(), number)
            self.channel.sendall(data)

    def send_and_be_hit(channel: Any, message: Any) -> None:
        torn: Any = Torn(channel)
        send(torn if stage == "sending" else channel, message)
        os.kill(os.getpid(), number)

    if stage == "before":
        os.kill(os.getpid(), number)
    protocol.send = send_and_be_hit
    return b"x" * (32 << 20)


@pytest.mark.fault("A rank ignores SIGTERM, SIGINT and SIGHUP.", "It is ended by SIGKILL at the launch's timeout.")
def test_a_rank_that_ignores_signals(launch: Launcher) -> None:
    def ignore() -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        while True:
            time.sleep(1)

    result = fail(launch, ignore, timeout=0.5)
    assert result.timed_out
    assert result.ranks[0].exit_status == -signal.SIGKILL


@pytest.mark.fault(
    "A rank moves into another process group, and never returns.", "It is ended at the launch's timeout all the same."
)
def test_a_rank_in_another_process_group(launch: Launcher) -> None:
    def leave() -> None:
        os.setpgid(0, os.getppid())
        time.sleep(600)

    assert fail(launch, leave, timeout=0.5).ranks[0].exit_status == -signal.SIGKILL


@pytest.mark.fault(
    "A rank forks, and the copy returns from the function as well.",
    "The launch has the rank's own result alone, once; the copy ends.",
)
def test_a_copy_of_a_rank_reports_nothing(launch: Launcher) -> None:
    def fork_and_both_return() -> tuple[int, bytes]:
        copy = os.fork()
        return copy, b"x" * (32 << 20)  # both would be sent at the same time, over the same connection

    copy, sent = launch(fork_and_both_return, strategy="single").values[0]
    assert copy > 0
    assert sent == b"x" * (32 << 20)
    wait_until_gone(copy)


@pytest.mark.fault("A rank closes all its descriptors.", "The launch fails: it ended before it could report.")
def test_closed_descriptors(launch: Launcher) -> None:
    result = fail(launch, lambda: os.closerange(0, 1 << 16))
    assert "first observed failure: rank 0 exited with status 1" in result.describe()


@pytest.mark.fault("A rank closes its `sys.stdout`, or replaces it.", "The launch returns its result.")
def test_a_closed_stdout(launch: Launcher) -> None:
    def close() -> int:
        print("first")
        sys.stdout.close()
        sys.stderr = None
        return 7

    (rank,) = launch(close, strategy="single").ranks
    assert (rank.value, rank.stdout) == (7, "first\n")


@pytest.mark.fault(
    "A rank leaves a thread running.", "The launch returns its result, and does not wait for the thread."
)
def test_a_thread_that_never_ends(launch: Launcher) -> None:
    started = time.monotonic()
    assert launch(lambda: threading.Thread(target=time.sleep, args=(600,)).start(), strategy="single").ok
    assert time.monotonic() - started < 15


class RaisesWhenUnpickled:
    """What a rank returns as if it were nothing special."""

    def __reduce__(self) -> Any:
        return int, ("seven",)


@pytest.mark.fault(
    "A result cannot be unpickled in the test process.",
    "The launch fails, says so, and shows the error that unpickling raised.",
)
def test_a_result_that_raises_when_it_is_unpickled(launch: Launcher) -> None:
    result = fail(launch, RaisesWhenUnpickled)
    assert "the function's result cannot be unpickled in the test process: ValueError: invalid lit" in result.describe()
    assert "first observed failure: rank 0 raised ValueError" in result.describe()


@pytest.mark.fault("A result has 200 MB.", "It comes whole.")
def test_a_huge_result(launch: Launcher) -> None:
    (value,) = launch(lambda: bytes(range(250)) * 800_000, strategy="single").values
    assert value == bytes(range(250)) * 800_000


@pytest.mark.fault("A rank may use no more memory.", "The launch fails with MemoryError and its traceback.")
def test_no_memory(launch: Launcher) -> None:
    def allocate() -> int:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))
        return len(bytearray(2 << 30))

    assert "first observed failure: rank 0 raised MemoryError" in fail(launch, allocate).describe()


@pytest.mark.fault(
    "The test process ignores SIGCHLD, as some daemons and containers make it do.", "Launches work, and are waited for."
)
def test_ignored_sigchld() -> None:
    printed = output_of(
        program(
            "import os, signal, subprocess\n"
            "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
            "from pytest_trlcompat.launch import Launcher\n"
            "with Launcher(device='cpu') as launch:\n"
            "    print(launch(lambda: subprocess.run(['sh', '-c', 'exit 3']).returncode, strategy='single').values)\n"
            "    print(launch(lambda: os._exit(3), strategy='single', check=False).ranks[0].exit_status)\n"
        )
    )
    assert printed == "[3]\n3\n"


@pytest.mark.fault("The test process has no standard streams.", "Launches work, and a rank's output is kept.")
def test_closed_standard_streams(tmp_path: Path) -> None:
    text = (
        "import os\n"
        "os.closerange(0, 3)\n"
        "from pytest_trlcompat.launch import Launcher\n"
        "with Launcher(device='cpu') as launch:\n"
        "    result = launch(print, 'printed', strategy='single')\n"
        f"open({str(tmp_path / 'out')!r}, 'w').write(result.ranks[0].stdout)\n"
    )
    output_of(program(text))
    assert (tmp_path / "out").read_text() == "printed\n"


@pytest.mark.fault(
    "The server is stopped by SIGSTOP in a launch.",
    "The launch fails half a minute after its timeout, and the next one starts another server.",
)
def test_a_stopped_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "_ANSWER_MARGIN", 1.0)
    monkeypatch.setattr(warm, "_STOP_TIMEOUT", 1.0)
    with Launcher(device="cpu") as launch:
        server = launch(os.getppid, strategy="single").values[0]
        with pytest.raises(LaunchError, match="^the launch server did not answer within 2 s"):
            launch(lambda: os.kill(os.getppid(), signal.SIGSTOP), strategy="single", timeout=1.0)
        wait_until_gone(server)
        assert launch(os.getppid, strategy="single").values[0] != server


@pytest.mark.fault(
    "The server is killed while it is sent a launch of 200 MB (broken pipe).",
    "The launch fails and says so, and the next one starts another server.",
)
def test_a_server_that_is_killed_while_it_is_sent_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    send = protocol.send

    class Torn:
        def __init__(self, channel: Any) -> None:
            self.channel = channel

        def sendall(self, data: bytes) -> None:
            if len(data) > 1 << 20:
                self.channel.sendall(data[: 1 << 16])
                os.kill(server, signal.SIGKILL)
                wait_until_gone(server)
            self.channel.sendall(data)

    def send_torn(channel: Any, message: Any) -> None:
        torn: Any = Torn(channel)
        send(torn, message)

    with Launcher(device="cpu") as launch:
        server = launch(os.getppid, strategy="single").values[0]
        with monkeypatch.context() as patched:
            patched.setattr(protocol, "send", send_torn)
            with pytest.raises(LaunchError, match="^the launch server was killed by SIGKILL .* starts a new one"):
                launch(len, b"x" * (200 << 20), strategy="single")
        assert launch(os.getppid, strategy="single").values[0] != server


@pytest.mark.fault("A rank writes into its connection to the server.", "The launch fails: it had not reported.")
def test_a_rank_that_writes_into_its_connection(launch: Launcher) -> None:
    def write() -> None:
        for entry in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                    os.write(int(entry), bytes(7) + b"\x08" + b"nonsense")

    assert "rank 0 exited with status" in fail(launch, write).describe()


@pytest.mark.fault("The server is killed while it imports the stack.", "The launch fails, and says so.")
def test_a_server_that_is_killed_when_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "peft.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    with Launcher(device="cpu") as launch, monkeypatch.context() as patched:
        patched.syspath_prepend(tmp_path)
        with pytest.raises(LaunchError, match="^the launch server was killed by SIGKILL"):
            launch(lambda: None, strategy="single")
        patched.undo()
        assert launch(lambda: 7, strategy="single").values == [7]


@pytest.mark.fault(
    "The clock jumps by a day, forwards or backwards, in test process, server and ranks.",
    "No launch ends early or late; times are those of a clock that does not jump.",
)
@pytest.mark.parametrize("day", [86400.0, -86400.0])
def test_a_clock_that_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, day: float) -> None:
    jumping = (
        "import time\n"
        "real, calls = time.time, []\n"
        "def jump():\n"
        "    calls.append(None)\n"
        f"    return real() + {day} * len(calls)\n"
        "time.time = jump\n"
    )
    (tmp_path / "peft.py").write_text(jumping)  # the server imports it, and ranks are forked from that
    monkeypatch.syspath_prepend(tmp_path)
    before = time.time
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, time, "time", before)
        exec(jumping, {})
        with Launcher(device="cpu") as launch:
            jumps = launch(lambda: (time.time() - time.time()) / day, strategy="single", timeout=10).ranks[0]
            assert round(jumps.value) == -1
            assert 0 < jumps.seconds < 10
            with pytest.raises(LaunchError, match="the launch's timeout of 1 s passed") as caught:
                launch(time.sleep, 600, strategy="single", timeout=1)
    assert caught.value.result is not None
    assert 1 <= caught.value.result.seconds < 15


def test_a_copy_of_the_test_process_leaves_the_folder_to_the_original(launch: Launcher) -> None:
    launch(lambda: None, strategy="single")
    assert launch._folder is not None
    copy = os.fork()
    if copy == 0:
        try:
            launch._folder.remove()
        finally:
            os._exit(0)
    os.waitpid(copy, 0)
    assert launch._folder.exists
