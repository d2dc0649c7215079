"""Cold launches: the same functions through the real commands give the numbers that warm launches give."""

from __future__ import annotations

import os
from typing import Any

import pytest

from pytest_trlcompat.launch import Launcher, LaunchError

from .conftest import ColdStep
from .launch_bodies import train_step
from .listened_launches import options_of

CASES = [
    ("zero3", "accelerate"),
    ("fsdp1", "accelerate"),
    ("zero2", "deepspeed"),
    pytest.param("ddp", "torchrun", marks=pytest.mark.newest_stack),  # torch is the same in the older one
]


@pytest.mark.parametrize(("strategy", "command"), CASES)
def test_cold_and_warm_agree_bitwise(launcher: Launcher, cold_step: ColdStep, strategy: str, command: str) -> None:
    warm = launcher(train_step, strategy=strategy, options=options_of(strategy))
    launch = cold_step(strategy, command)
    cold = launch.result
    assert launch.steps == warm.values
    assert [rank.proof["engines"] for rank in cold.ranks] == [rank.proof["engines"] for rank in warm.ranks]
    assert cold.mode == "cold"


@pytest.mark.fault(
    "A rank of a cold launch is killed by SIGKILL.",
    "The launch fails, and names the rank and the signal.",
)
@pytest.mark.newest_stack
def test_a_cold_failure_is_reported_like_a_warm_one(launcher: Launcher) -> None:
    def fail_on_rank_1() -> None:
        import sys
        import time

        from accelerate import PartialState

        PartialState().wait_for_everyone()
        print("a word before")
        if os.environ["RANK"] == "1":
            sys.stdout.flush()
            time.sleep(1)  # so that the other has left the barrier
            os.kill(os.getpid(), 9)

    with pytest.raises(LaunchError) as caught:
        launcher(fail_on_rank_1, strategy="ddp", sharded=False, mode="cold", command="torchrun")
    assert "first observed failure: rank 1 was killed by SIGKILL (often: out of memory)" in str(caught.value)
    assert "a word before" in str(caught.value)


@pytest.mark.fault(
    "A rank of a cold launch never returns.",
    "The launch ends at its timeout, and shows in which function the rank was.",
)
@pytest.mark.newest_stack
def test_a_cold_hang_ends_with_the_timeout(launcher: Launcher) -> None:
    def sleep_for_ever() -> None:
        import time

        time.sleep(600)

    with pytest.raises(LaunchError) as caught:
        launcher(sleep_for_ever, strategy="single", mode="cold", timeout=20)
    assert caught.value.result is not None
    assert caught.value.result.timed_out
    assert "it was in sleep_for_ever" in str(caught.value)


def test_a_command_that_starts_fewer_ranks_is_refused_at_once(launcher: Launcher) -> None:
    """Without MPI, accelerate starts one process on a plain CPU, however many it is told to start."""
    wanted = (
        r"accelerate started 1 of 2 ranks: on a plain CPU it starts several by MPI alone, so leave command out, "
        r"or pass command='torchrun'; its output"
    )
    with pytest.raises(LaunchError, match=wanted):
        launcher(train_step, strategy="ddp", device="cpu", mode="cold", command="accelerate")


@pytest.mark.fault(
    "The command of a cold launch refuses to start.",
    "The launch fails, and shows what the command printed.",
)
def test_a_command_that_refuses_is_quoted(launcher: Launcher) -> None:
    environment = {"OMP_NUM_THREADS": "many"}
    with pytest.raises(LaunchError, match="accelerate exited with status 1 and started 0 of 2 ranks; its output"):
        launcher(train_step, strategy="ddp", mode="cold", env=environment)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"mode": "lukewarm"}, "unknown mode 'lukewarm'; known are warm, cold"),
        ({"mode": "cold", "command": "mpirun"}, "unknown command 'mpirun'; known are accelerate, torchrun, deepspeed"),
        ({"mode": "cold", "command": "deepspeed"}, "command 'deepspeed' launches zero1, zero2 and zero3"),
        ({"command": "torchrun"}, "command 'torchrun' is for cold launches"),
    ],
)
def test_bad_requests_are_refused(launcher: Launcher, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        launcher(train_step, strategy="ddp", **arguments)
