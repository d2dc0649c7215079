"""``launch`` with the stack on machines that lack something, and ranks that get a signal while others wait for them."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.launch import Launcher, LaunchError

from ..launch.processes import open_in_server, output_of, permitted, program, wait_until, wait_until_gone
from .launch_bodies import all_reduce, meet

SUMS = (
    "from pytest_trlcompat.launch import Launcher, LaunchError\n"
    "from tests.stack.launch_bodies import all_reduce\n"
    "with Launcher(device='software') as launch:\n"
    "    print(launch(all_reduce, strategy='ddp', sharded=False).values)\n"
)


@pytest.fixture
def failing(launch: Launcher) -> Callable[..., LaunchError]:
    """Launch a function that must fail, after which the next launch must work."""

    def fail(function: Callable[..., Any], *args: Any, **settings: Any) -> LaunchError:
        with pytest.raises(LaunchError) as caught:
            launch(function, *args, strategy="ddp", sharded=False, **{"timeout": 60.0, **settings})
        assert launch(all_reduce, strategy="ddp", sharded=False).values == [3.0, 3.0]
        return caught.value

    return fail


def hit_rank_1(number: int, before_the_rendezvous: bool) -> None:
    import torch

    if before_the_rendezvous and os.environ["RANK"] == "1":
        os.kill(os.getpid(), number)
    rank, device = meet()
    if rank == 1:
        os.kill(os.getpid(), number)
    torch.distributed.all_reduce(torch.ones(1, device=device))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
@pytest.mark.parametrize(
    "before",
    [
        pytest.param(
            True,
            marks=pytest.mark.fault(
                "A rank is killed before the rendezvous, where another waits for it.",
                "The launch fails, and names the rank and the signal first.",
            ),
        ),
        False,
    ],
)
def test_a_rank_gets_a_signal_while_another_waits(
    failing: Callable[..., LaunchError], number: signal.Signals, before: bool
) -> None:
    first, *_ = str(failing(hit_rank_1, number, before)).splitlines()
    assert f"first observed failure: rank 1 was killed by {number.name}" in first


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.fault(
    "A rank is stopped by SIGSTOP while another waits for it in a collective.",
    "The launch ends at its timeout, and says which rank was stopped.",
)
def test_a_rank_is_stopped_while_another_waits(failing: Callable[..., LaunchError], before: bool) -> None:
    error = failing(hit_rank_1, signal.SIGSTOP, before, timeout=3.0)
    assert error.result is not None
    assert error.result.timed_out
    assert error.result.ranks[1].describe().endswith("the launch's timeout of 3 s passed; it was stopped by a signal")


@pytest.mark.fault(
    "The server runs out of descriptors in a launch of four ranks.",
    "The launch fails, and names the rank or the store; the ranks before it end, and the same server goes on.",
)
def test_descriptors_run_out_between_ranks(launch: Launcher) -> None:
    def server_state() -> tuple[int, int, int]:
        server = os.getppid()
        children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        return server, open_in_server(server), len(children)

    server, opened, _ = launch(server_state, strategy="single").values[0]
    before = resource.prlimit(server, resource.RLIMIT_NOFILE)
    texts = []
    for room in (5, 8, 11, 14):
        resource.prlimit(server, resource.RLIMIT_NOFILE, (opened + room, before[1]))
        with pytest.raises(LaunchError) as caught:
            launch(all_reduce, strategy="ddp", world_size=4, sharded=False, timeout=10)
        texts.append(str(caught.value))
        resource.prlimit(server, resource.RLIMIT_NOFILE, before)
        assert launch(server_state, strategy="single").values[0] == (server, opened, 1)
    refused = "the launch could not begin: rank {} of 4 could not be started: OSError: [Errno 24] Too many open files"
    assert any(text.startswith(refused.format(number)) for text in texts for number in (1, 2, 3)), texts


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            "size=4k", marks=pytest.mark.fault("`/dev/shm` has room for one page.", "Launches work, collectives too.")
        ),
        pytest.param(
            "",
            marks=pytest.mark.fault(
                "There is no `/dev/shm`.",
                "Launches work, collectives too.",
            ),
            id="none",
        ),
    ],
)
def test_shared_memory(options: str, tmp_path: Path) -> None:
    if options:
        change = f"mount -t tmpfs -o {options} tmpfs /dev/shm"
    else:  # another /dev, with nothing but what every program needs
        change = (
            f"mount -t tmpfs tmpfs {tmp_path} && cp -a /dev/null /dev/zero /dev/random /dev/urandom {tmp_path} && "
            f"mount --move {tmp_path} /dev"
        )
    command = [*permitted("unshare", "-m"), "sh", "-c", f'{change} && exec "$@"', "sh", *program(SUMS)]
    assert output_of(command) == "[3.0, 3.0]\n"


@pytest.mark.fault(
    "The machine has IPv6 alone: its loopback has no address but `::1`.", "Launches work, collectives too."
)
def test_ipv6_alone() -> None:
    change = "ip link set lo up && ip address del 127.0.0.1/8 dev lo"
    network = permitted("unshare", "-n", "sh", "-c", f'{change} && exec "$@"', "sh")
    assert output_of([*network, *program(SUMS)]) == "[3.0, 3.0]\n"


@pytest.mark.fault("The loopback is down.", "A launch of one rank works; one of several fails, and names the loopback.")
def test_no_loopback() -> None:
    text = SUMS.replace(
        "    print(", "    print(launch(len, 'ab', strategy='single').values)\n    try:\n        print(", 1
    )
    text += "    except LaunchError as error:\n        print(error)\n"
    printed = output_of([*permitted("unshare", "-n"), *program(text)])
    assert printed.startswith("[2]\nlaunch of all_reduce under ddp on 2 rank(s), device software failed; ")
    assert "Unable to find address for: lo\n" in printed


@pytest.mark.fault(
    "A cold launch has a `TMPDIR` longer than a Unix socket's path may be.", "It works as with a short one."
)
def test_a_cold_launch_with_a_long_tmpdir(tmp_path: Path) -> None:
    long = tmp_path / ("t" * 120)
    long.mkdir()
    text = (
        "from pytest_trlcompat.launch import Launcher\n"
        "with Launcher(device='software') as launch:\n"
        "    print(launch(lambda: 7, strategy='single', mode='cold').values)\n"
    )
    assert output_of(program(text), TMPDIR=str(long)) == "[7]\n"
    assert not list(long.iterdir())


@pytest.mark.fault(
    "The test process is killed by SIGKILL in a cold launch.",
    "The command, the ranks and their daemons end, and the folder for temporary files is removed.",
)
def test_a_killed_test_process_ends_its_cold_launch(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    text = (
        "import os, subprocess, sys, time\n"
        "from pytest_trlcompat.launch import Launcher\n"
        "def body(name):\n"
        "    daemon = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "    open(name + '.new', 'w').write(f'{os.getpid()} {os.getppid()} {daemon.pid}')\n"
        "    os.rename(name + '.new', name)\n"
        "    time.sleep(600)\n"
        "with Launcher(device='software') as launch:\n"
        "    launch(body, sys.argv[1], strategy='single', mode='cold', sharded=False)\n"
    )
    pids, environment = tmp_path / "pids", {**os.environ, "TMPDIR": str(tmp_path / "t")}
    process = subprocess.Popen([*program(text), str(pids)], env=environment)
    deadline = time.monotonic() + 120
    while not pids.exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    assert list((tmp_path / "t").iterdir())
    process.kill()
    process.wait()
    for pid in pids.read_text().split():
        wait_until_gone(int(pid))
    wait_until(lambda: not list((tmp_path / "t").iterdir()), "the folder is still there")


@pytest.mark.fault(
    "The system refuses the process of a rank of a cold launch.",
    "The launch fails, and shows what the command printed of it.",
)
def test_a_refused_fork_of_a_cold_rank(launch: Launcher, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import errno, os, sys\n"
        "def refuse():\n"
        "    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))\n"
        "if any('launch.keeper' in word for word in sys.orig_argv):\n"
        "    os.fork = refuse\n"
    )
    with pytest.raises(LaunchError) as caught:
        launch(len, "ab", strategy="single", mode="cold", env={"PYTHONPATH": str(tmp_path)})
    assert "before it could report" in str(caught.value)
    assert "BlockingIOError: [Errno 11] Resource temporarily unavailable" in str(caught.value)
    assert launch(len, "ab", strategy="single").values == [2]


@pytest.mark.fault(
    "The command of a cold launch is killed by SIGKILL.",
    "The launch fails, and says that its ranks were lost with the command; they end.",
)
def test_a_killed_command(launch: Launcher, tmp_path: Path) -> None:
    def kill_the_command(file: str) -> None:
        pid = os.getpid()
        while "accelerate.commands.launch" not in Path(f"/proc/{pid}/cmdline").read_text():
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        Path(file).write_text(str(os.getpid()))
        os.kill(pid, signal.SIGKILL)
        time.sleep(600)

    started = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        launch(kill_the_command, str(tmp_path / "pid"), strategy="single", mode="cold", timeout=300)
    assert time.monotonic() - started < 120
    assert "accelerate was killed by SIGKILL" in str(caught.value)
    wait_until_gone(int((tmp_path / "pid").read_text()))


def test_these_programs_have_this_path() -> None:
    assert output_of(program("import sys; print(sys.path)")) == f"{sys.path}\n"
