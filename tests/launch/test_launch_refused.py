"""The system refuses a launch something: it ends what it had begun, says so, and the next launch works; no stack."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat import _processes
from pytest_trlcompat.launch import Launcher, LaunchError, children
from pytest_trlcompat.launch.cluster import Cluster
from pytest_trlcompat.launch.limits import explain
from pytest_trlcompat.launch.messages import LaunchSpec
from pytest_trlcompat.launch.payload import dump
from pytest_trlcompat.launch.proof import expectation
from pytest_trlcompat.launch.strategy import strategy

from .processes import open_in_server, output_of, program, unprivileged


def three_ranks(folder: Path) -> LaunchSpec:
    """A launch of three ranks that need no store, and that never end by themselves."""
    single = strategy("single")
    return LaunchSpec(
        payload=dump(time.sleep, (600,), {}),
        strategy="single",
        device="cpu",
        mode="warm",
        timeout=60.0,
        seed=0,
        cwd=os.getcwd(),
        sys_path=tuple(sys.path),
        rank_environment=({}, {}, {}),
        expectation=expectation(single, 1, "cpu", False),
        cluster=Cluster(),
        number=1,
        folder=str(folder),
    )


@contextlib.contextmanager
def in_a_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Stand for a server that has no children but its ranks; yields its connection to a client."""
    monkeypatch.setattr(children, "end_orphans", lambda: None)  # the children of this process are others' too
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield theirs


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.fault(
    "The system refuses the process of one of three ranks (EAGAIN).",
    "The ranks before it are ended; the launch fails, and names the rank, the reason and the limits.",
)
def test_a_refused_fork_ends_what_had_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    fork = os.fork
    forked: list[int] = []
    before, open_before = set(_processes.children()), os.listdir("/proc/self/fd")

    def refuse() -> int:
        if len(forked) == number:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        forked.append(fork())
        return forked[-1]

    with in_a_server(monkeypatch) as client:
        monkeypatch.setattr(os, "fork", refuse)
        text = rf"^rank {number} of 3 could not be started: BlockingIOError: .* \(`ulimit -u`\), and the control group"
        with pytest.raises(children.Refused, match=text):
            children.launch(three_ranks(tmp_path), client)
    assert len(forked) == number
    assert set(_processes.children()) == before
    assert os.listdir("/proc/self/fd") == open_before


def test_a_rank_that_cannot_be_watched_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(_processes.children())

    def refuse(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with in_a_server(monkeypatch) as client:
        monkeypatch.setattr(os, "pidfd_open", refuse)
        with pytest.raises(children.Refused, match=r"^rank 0 of 3 could not be started: .*\(`ulimit -n`\)$"):
            children.launch(three_ranks(tmp_path), client)
    assert set(_processes.children()) == before


@pytest.mark.fault(
    "The server runs out of descriptors at any point of a launch (EMFILE).",
    "The launch fails, and names the limit; the server goes on, and no rank of the launch is left.",
)
def test_descriptors_run_out_at_any_point() -> None:
    def server_state() -> tuple[int, int, list[int]]:
        server = os.getppid()
        others = [int(pid) for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()]
        return server, open_in_server(server), [pid for pid in others if pid != os.getpid()]

    with Launcher(device="cpu", timeout=20) as launch:
        server, opened, _ = launch(server_state, strategy="single").values[0]
        before = resource.prlimit(server, resource.RLIMIT_NOFILE)
        failures = []
        for room in range(-6, 20):
            resource.prlimit(server, resource.RLIMIT_NOFILE, (opened + room, before[1]))
            try:
                launch(lambda: None, strategy="single")
            except LaunchError as error:
                failures.append(str(error))
            resource.prlimit(server, resource.RLIMIT_NOFILE, before)
            assert launch(server_state, strategy="single").values[0] == (server, opened, [])
    assert 3 <= len(failures) < 26
    for failure in failures:
        assert re.search(r"the launch could not begin: .*Errno 24.*\(`ulimit -n`\)", failure) or "rank 0" in failure


@pytest.mark.fault(
    "The user may have no more processes when a rank is forked (`ulimit -u`).",
    "The launch fails, and names the limit; the same server makes the next launch once there is room.",
)
def test_no_process_for_a_rank() -> None:
    printed = output_of(
        unprivileged()
        + program(
            "import os, resource\n"
            "from pytest_trlcompat.launch import Launcher, LaunchError\n"
            "with Launcher(device='cpu') as launch:\n"
            "    server = launch(os.getppid, strategy='single').values[0]\n"
            "    before = resource.prlimit(server, resource.RLIMIT_NPROC)\n"
            "    resource.prlimit(server, resource.RLIMIT_NPROC, (1, before[1]))\n"
            "    try:\n"
            "        launch(os.getppid, strategy='single')\n"
            "    except LaunchError as error:\n"
            "        print(error)\n"
            "    resource.prlimit(server, resource.RLIMIT_NPROC, before)\n"
            "    print(launch(os.getppid, strategy='single').values == [server])\n"
        ),
        TMPDIR="/tmp",
    )
    refused, works = printed.splitlines()
    assert re.match(
        r"the launch could not begin: rank 0 of 1 could not be started: BlockingIOError: \[Errno 11\] .*"
        r"the user may have 1 \(`ulimit -u`\)",
        refused,
    )
    assert works == "True"


@pytest.mark.fault(
    "The user may have no more processes when the server is started.",
    "The launch fails, and names the limit; no folder is left, and the next launch works.",
)
def test_no_process_for_the_server(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    printed = output_of(
        unprivileged()
        + program(
            "import os, resource\n"
            "from pytest_trlcompat.launch import Launcher, LaunchError\n"
            "launch = Launcher(device='cpu')\n"
            "hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]\n"
            "resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))\n"
            "try:\n"
            "    launch(os.getppid, strategy='single')\n"
            "except LaunchError as error:\n"
            "    print(error, os.listdir(os.environ['TMPDIR']))\n"
            "resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))\n"
            "print(launch(lambda: 7, strategy='single').values)\n"
            "launch.close()\n"
        ),
        TMPDIR=str(tmp_path),
        TRLCOMPAT_CACHE=str(tmp_path.parent / "cache"),
    )
    refused, works = printed.splitlines()
    assert re.match(r"the launch could not begin: BlockingIOError: .*may have 1 \(`ulimit -u`\).* \[\]$", refused)
    assert works == "[7]"
    assert not list(tmp_path.iterdir())


@pytest.mark.fault(
    "The test process runs out of descriptors at any point of a launch.",
    "The launch fails, and names the limit; the next one works.",
)
def test_the_test_process_runs_out_of_descriptors() -> None:
    printed = output_of(
        program(
            "import os, resource\n"
            "from pytest_trlcompat.launch import Launcher, LaunchError\n"
            "import pytest_trlcompat.accelerator.artefacts, traceback, warnings, linecache\n"
            "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
            "opened, failed = len(os.listdir('/proc/self/fd')) - 1, []\n"
            "for room in (1, 2, 3, 4, 5, 6, 7, 8, 20):\n"
            "    launch = Launcher(device='cpu')\n"
            "    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + room, hard))\n"
            "    try:\n"
            "        launch(os.getppid, strategy='single')\n"
            "    except LaunchError as error:\n"
            "        failed.append(str(error))\n"
            "    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))\n"
            "    assert launch(lambda: 7, strategy='single').values == [7]\n"
            "    launch.close()\n"
            "    left = [os.readlink(e.path) for e in os.scandir('/proc/self/fd')]\n"
            "    assert len(os.listdir('/proc/self/fd')) - 1 == opened, (room, failed, left)\n"
            "print(len(failed), all('(`ulimit -n`)' in text for text in failed), failed)\n"
        )
    )
    count, named, *_ = printed.split()
    assert (2 <= int(count) < 9, named) == (True, "True"), printed


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.ENOSPC, "no space, or no more files, in the folder for temporary files (`TMPDIR`)"),
        (errno.ENOMEM, "no more memory for another process"),
    ],
)
def test_limits_are_named(number: int, text: str) -> None:
    assert explain(OSError(number, os.strerror(number))) == f"OSError: [Errno {number}] {os.strerror(number)}: {text}"


def test_other_errors_stand_as_they_are() -> None:
    error: Any = FileNotFoundError(errno.ENOENT, "No such file or directory", "/a")
    assert explain(error) == "FileNotFoundError: [Errno 2] No such file or directory: '/a'"
