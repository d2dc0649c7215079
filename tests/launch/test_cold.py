"""Cold launches whose command does not start the ranks as asked; here it is a small program, without the stack."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.launch import Cluster, ClusterError, Launcher, LaunchError, cold

from .processes import wait_until_gone

KEEPER = "-m", "pytest_trlcompat.launch.keeper"
Start = Callable[[str, float], str]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    """A function that launches two ranks by a program, with a timeout, and returns the error's first line.

    The program finds the socket's path as ``sys.argv[1]``, what starts a keeper, but for that, as ``KEEPER``.
    """
    head = f"import os, socket, subprocess, sys, time\nKEEPER = {[sys.executable, *KEEPER]!r}\n"

    def launch(program: str, timeout: float) -> str:
        def command(*arguments: Any) -> list[str]:
            return [sys.executable, "-c", head + program, str(arguments[-1] / "s")]

        monkeypatch.setattr(cold, "_command", command)
        with Launcher(device="cpu", timeout=timeout) as launcher, pytest.raises(LaunchError) as caught:
            launcher(lambda: None, strategy="ddp", mode="cold")
        return str(caught.value).splitlines()[0]

    return launch


def environment(rank: int, world_size: int) -> str:
    return f"{{**os.environ, 'LOCAL_RANK': '{rank}', 'WORLD_SIZE': '{world_size}'}}"


def test_ranks_that_never_begin(start: Start, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    program = (
        f"keeper = subprocess.Popen([*KEEPER, sys.argv[1]], env={environment(0, 2)})\n"
        f"open({str(note)!r}, 'w').write(str(keeper.pid))\ntime.sleep(600)"
    )
    wanted = "torchrun started 1 of 2 ranks within the launch's timeout of 15 s; its output:"
    assert start(program, 15) == wanted
    wait_until_gone(int(note.read_text()))


def test_a_keeper_that_says_nothing(start: Start) -> None:
    program = "it = socket.socket(socket.AF_UNIX)\nit.connect(sys.argv[1])\ntime.sleep(600)"
    wanted = "torchrun started 0 of 2 ranks within the launch's timeout of 5 s; 1 more had connected and said nothing"
    assert start(program, 5) == f"{wanted}; its output:"


def test_a_keeper_that_says_half_of_it(start: Start) -> None:
    program = (
        "it = socket.socket(socket.AF_UNIX)\nit.connect(sys.argv[1])\nit.send(bytes([0] * 7 + [5, 1]))\ntime.sleep(600)"
    )
    assert start(program, 5).startswith("torchrun started 0 of 2 ranks within the launch's timeout of 5 s; 1 more")


def test_a_world_of_another_size(start: Start) -> None:
    program = f"subprocess.run([*KEEPER, sys.argv[1]], env={environment(0, 1)})"
    assert start(program, 60) == "torchrun started 1 of 2 ranks; its output:"


def test_the_same_rank_twice(start: Start) -> None:
    program = f"for _ in range(2): subprocess.Popen([*KEEPER, sys.argv[1]], env={environment(0, 2)})\ntime.sleep(600)"
    assert start(program, 60) == "torchrun started rank 0 of 2 twice, or one too many; its output:"


def test_a_command_that_ends_early(start: Start) -> None:
    assert start("sys.exit(3)", 60) == "torchrun exited with status 3 and started 0 of 2 ranks; its output:"


def test_several_machines_are_refused() -> None:
    cluster = Cluster(2, 0, "127.0.0.1:29400", "a secret of machines")
    with Launcher(device="cpu", cluster=cluster) as launcher, pytest.raises(ClusterError) as caught:
        launcher(lambda: None, strategy="ddp", mode="cold")
    assert str(caught.value).startswith("cold launches run on one machine: the agents of torchrun and accelerate")
