"""Nobody on another machine, and no other user of this one, reaches the sockets and stores of a launch."""

from __future__ import annotations

import contextlib
import os
import pty
import pwd
import re

import pytest

from pytest_trlcompat.launch import NAMES, Launcher, LaunchError
from pytest_trlcompat.launch.debugging import Debug

from .conftest import ColdStep
from .listened_launches import ListenedLaunch, launch_and_listen
from .listening_bodies import be_attacked, be_impersonated, files_others_try

COLD = [
    ("single", "accelerate"),
    ("ddp", "accelerate"),
    ("ddp", "torchrun"),
    ("zero2", "deepspeed"),
    ("zero3", "accelerate"),
    ("fsdp1", "accelerate"),
    ("fsdp2", "torchrun"),
]
"""Each way in which a command starts ranks, and each engine's variables by a command that does not set them itself."""
FORBIDDEN = "PermissionError"


def check_losses(launch: ListenedLaunch) -> None:
    losses = [step["losses"] for step in launch.steps]
    assert losses[0] == losses[-1]


@pytest.mark.parametrize("strategy", NAMES)
def test_a_warm_launch_listens_on_the_loopback_alone(launcher: Launcher, strategy: str) -> None:
    launch = launch_and_listen(launcher, strategy)
    check_losses(launch)
    found, keepers = (launch.result.values[0][name] for name in ("listeners", "keepers"))
    assert [text for _, protected, text in found if not protected] == []
    assert [str(each) for each in launch.listeners if not each.protected] == []
    kinds = [kind for kind, _, _ in found]
    assert ("tcp" in kinds) == (strategy != "single")  # gloo's connections; without several ranks there are none
    assert "unix" not in kinds
    assert keepers == []


@pytest.mark.parametrize(("strategy", "command"), COLD)
def test_a_cold_launch_listens_on_the_loopback_alone(cold_step: ColdStep, strategy: str, command: str) -> None:
    launch = cold_step(strategy, command)
    check_losses(launch)
    found, keepers = (launch.result.values[0][name] for name in ("listeners", "keepers"))
    assert [text for _, protected, text in found if not protected] == []
    assert [str(each) for each in launch.listeners if not each.protected] == []
    kinds = [kind for kind, _, _ in found]
    assert ("tcp" in kinds) == (strategy != "single")
    assert kinds.count("unix") == 1  # at which the ranks' keepers connect
    assert keepers == [True]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can try as another user")
@pytest.mark.parametrize("command", [None, "torchrun"])
def test_another_user_reaches_no_store_and_no_keeper(launcher: Launcher, command: str | None) -> None:
    mode = "warm" if command is None else "cold"
    result = launcher(be_attacked, os.getpid(), strategy="ddp", sharded=False, mode=mode, command=command)
    attempts = result.values[0]["attempts"]
    assert attempts.pop("connect to the store's port") == "ConnectionRefusedError"
    counted = {name: int(attempts.pop(name)) for name in ("files", "stores", "keepers", "ports")}
    assert counted["stores"] == 1
    assert counted["keepers"] == (0 if command is None else 1)
    assert counted["ports"] >= 2
    assert len(attempts) == 1 + 2 * counted["files"] + counted["keepers"]
    assert set(attempts.values()) == {FORBIDDEN}, attempts
    assert [value["sum"] for value in result.values] == [3.0, 3.0]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can try as another user")
@pytest.mark.parametrize("how", ["software warm", "software cold", "cpu warm", "debugged"])
def test_another_user_can_open_no_file_that_a_launch_writes(launcher: Launcher, how: str) -> None:
    """Stores, outputs, results, notes, shared memory: all that the server, keepers and ranks have open."""
    device, _, mode = how.partition(" ")
    with contextlib.ExitStack() as stack:
        if how == "debugged":
            device, mode = "software", "warm"
            launcher = stack.enter_context(Launcher(device=device, debug=lambda: debugged(stack)))
        result = launcher(files_others_try, os.getpid(), strategy="ddp", sharded=False, device=device, mode=mode)
    attempts, found = result.values[0]["attempts"], result.values[0]["listeners"]
    assert any("store-" in name for name in attempts)
    assert len(attempts) >= 2
    assert {name: outcome for name, outcome in attempts.items() if outcome != FORBIDDEN} == {}
    assert [text for _, protected, text in found if not protected] == []
    assert {kind for kind, _, _ in found} == ({"tcp", "unix"} if mode == "cold" else {"tcp"})  # and no debugger's


def debugged(stack: contextlib.ExitStack) -> contextlib.AbstractContextManager[Debug]:
    """Rank 1 gets a terminal, as from ``--trlcompat-debug-rank``."""
    main, other = pty.openpty()
    for descriptor in (main, other):
        stack.callback(os.close, descriptor)
    return contextlib.nullcontext(Debug(1, os.ttyname(other)))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can try as another user")
@pytest.mark.parametrize("mode", ["warm", "cold"])
@pytest.mark.parametrize("device", ["software", "cpu"])
def test_another_user_who_stands_in_for_a_rank_is_refused(launcher: Launcher, device: str, mode: str) -> None:
    with pytest.raises(LaunchError) as caught:
        launcher(be_impersonated, os.getpid(), strategy="ddp", sharded=False, device=device, mode=mode)
    assert "first observed failure: rank 0 raised RuntimeError" in str(caught.value)
    whose = f"the user with the id {pwd.getpwnam('nobody').pw_uid}"
    wanted = rf"{whose} is connected to port \d+ of the loopback, where gloo lets other ranks of this launch in"
    assert re.search(wanted, str(caught.value))
