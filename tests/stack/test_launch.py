"""``launch`` with the stack: every strategy really is what it says, and a downgrade is caught.

The bodies are plain torch, Accelerate and DeepSpeed; those with TRL's trainers are the suites.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat._processes import state_of
from pytest_trlcompat.launch import Launcher, LaunchError

from .launch_bodies import ELEMENTS, meet, train_step


@pytest.fixture(scope="module")
def ddp_losses(launcher: Launcher) -> list[float]:
    losses: list[float] = launcher(train_step, strategy="ddp").values[0]["losses"]
    return losses


@pytest.mark.parametrize(
    ("strategy", "engine", "local"),
    [
        ("ddp", "ddp", ELEMENTS),
        ("zero1", "deepspeed", ELEMENTS),
        ("zero2", "deepspeed", ELEMENTS),
        ("zero3", "deepspeed", ELEMENTS // 2),
        ("fsdp1", "fsdp1", ELEMENTS // 2),
        ("fsdp2", "fsdp2", ELEMENTS // 2),
    ],
)
def test_each_strategy_is_proved_and_computes_the_same(
    launcher: Launcher, ddp_losses: list[float], strategy: str, engine: str, local: int
) -> None:
    options = {"auto_wrap_policy": "NO_WRAP"} if strategy.startswith("fsdp") else {}
    result = launcher(train_step, strategy=strategy, options=options)
    assert [value["rank"] for value in result.values] == [0, 1]
    assert [value["device"] for value in result.values] == ["npu:0", "npu:1"]
    for rank in result.ranks:
        proof = rank.proof["engines"][engine]
        assert (proof["local"], proof["total"]) == (local, ELEMENTS)
        assert rank.proof["world_size"] == 2
        assert rank.value["losses"] == pytest.approx(ddp_losses, abs=1e-6)
    assert ddp_losses[0] - ddp_losses[-1] > 0.01  # it really trained


def test_no_shard_is_distinguished(launcher: Launcher) -> None:
    options = {"auto_wrap_policy": "NO_WRAP", "sharding_strategy": "NO_SHARD"}
    result = launcher(train_step, strategy="fsdp1", options=options)
    proof = result.ranks[0].proof["engines"]["fsdp1"]
    assert (proof["local"], proof["sharding_strategy"]) == (ELEMENTS, "NO_SHARD")


def test_a_silent_downgrade_fails(launcher: Launcher) -> None:
    def forget_fsdp() -> dict[str, Any]:
        import os

        os.environ["ACCELERATE_USE_FSDP"] = "false"
        return train_step()

    with pytest.raises(LaunchError, match=r"no fsdp1 engine was built \(built: ddp\)") as caught:
        launcher(forget_fsdp, strategy="fsdp1")
    assert "distributed type FSDP was requested, MULTI_NPU was found" in str(caught.value)


def test_a_model_on_the_cpu_fails_as_on_a_gpu(launcher: Launcher) -> None:
    def forget_to_move() -> None:
        import torch

        torch.nn.Linear(4, 4)(torch.ones(2, 4, device="npu:0"))

    with pytest.raises(LaunchError) as caught:
        launcher(forget_to_move, strategy="single")
    assert caught.value.failure is not None
    assert "Expected all tensors to be on the same device" in caught.value.failure.message


def all_reduce(rounds: int) -> list[float]:
    import torch
    from accelerate import PartialState

    state = PartialState()
    total = torch.zeros(1, device=state.device)
    for _ in range(rounds):
        value = torch.full((1,), float(state.process_index + 1), device=state.device)
        torch.distributed.all_reduce(value)
        total += value
    return [total.item(), torch.npu.device_count()]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_world_sizes_and_devices(launcher: Launcher, world_size: int) -> None:
    result = launcher(all_reduce, 3, strategy="ddp", world_size=world_size, sharded=False)
    assert result.values == [[3.0 * world_size * (world_size + 1) / 2, world_size]] * world_size


def test_single_has_one_device_and_no_process_group(launcher: Launcher) -> None:
    def look() -> tuple[int, bool]:
        import torch

        return torch.npu.device_count(), torch.distributed.is_initialized()

    assert launcher(look, strategy="single").values == [(1, False)]


def test_the_first_failure_comes_first_and_others_do_not_wait_for_ever(launcher: Launcher) -> None:
    def one_rank_raises() -> None:
        import os

        import torch
        from accelerate import PartialState

        state = PartialState()
        torch.distributed.barrier()
        if os.environ["RANK"] == "1":
            raise ArithmeticError("rank 1 is the culprit")
        torch.distributed.all_reduce(torch.ones(1, device=state.device))

    started = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        launcher(one_rank_raises, strategy="ddp", sharded=False, timeout=60)
    assert time.monotonic() - started < 30
    assert "first observed failure: rank 1 raised ArithmeticError" in str(caught.value)
    assert "rank 0" in str(caught.value)


def test_a_rank_that_has_returned_keeps_its_connections_until_the_others_have(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Otherwise another rank may fail in the collective that was the last of both."""

    def state_of_the_first() -> str:
        meet()
        own = tmp_path / "pid"
        if os.environ["RANK"] == "0":
            own.with_suffix(".new").write_text(str(os.getpid()))
            own.with_suffix(".new").rename(own)
            return ""
        while not own.exists():
            time.sleep(0.01)
        time.sleep(0.5)
        return state_of(int(own.read_text()))

    found = launcher(state_of_the_first, strategy="ddp", sharded=False)
    assert found.values[1] in ("S", "R")
    assert [rank.exit_status for rank in found.ranks] == [0, 0]


def test_a_hang_in_a_collective_shows_where(launcher: Launcher) -> None:
    def only_rank_0_waits() -> None:
        import os
        import time

        import torch
        from accelerate import PartialState

        state = PartialState()
        if os.environ["RANK"] == "0":
            torch.distributed.all_reduce(torch.ones(1, device=state.device))
        time.sleep(600)

    with pytest.raises(LaunchError) as caught:
        launcher(only_rank_0_waits, strategy="ddp", sharded=False, timeout=3)
    assert caught.value.result is not None
    assert caught.value.result.timed_out
    assert "in all_reduce" in caught.value.result.ranks[0].stderr
    assert "in only_rank_0_waits" in caught.value.result.ranks[1].stderr
    assert launcher(all_reduce, 1, strategy="ddp", sharded=False).values[0][0] == 3.0


def test_every_launch_starts_from_the_same_random_state(launcher: Launcher) -> None:
    def draw() -> list[float]:
        import random

        import numpy as np
        import torch

        return [random.random(), float(np.random.rand()), torch.rand(1).item(), torch.rand(1, device="npu").item()]

    first, second = launcher(draw, strategy="single").values[0], launcher(draw, strategy="single").values[0]
    assert first == second
    assert launcher(draw, strategy="single", seed=1).values[0] != first


def test_a_progress_bar_starts_no_process(launcher: Launcher) -> None:
    def look() -> int:
        import multiprocessing

        from tqdm.auto import tqdm

        from pytest_trlcompat._processes import children

        multiprocessing.set_start_method("spawn", force=True)  # as some releases of DeepSpeed do
        list(tqdm(range(2)))
        return len(children())

    assert launcher(look, strategy="single").values == [0]


def test_looking_up_an_auto_class_imports_nothing(launcher: Launcher) -> None:
    def look() -> list[str]:
        import sys

        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        before = set(sys.modules)
        for auto in (AutoModelForCausalLM, AutoModelForSequenceClassification):
            list(auto._model_mapping.keys())
        return sorted(set(sys.modules) - before)

    assert launcher(look, strategy="single").values == [[]]


def test_fixtures_launch_their_strategy(
    ddp_launcher: Callable[..., Any], deepspeed_launcher: Callable[..., Any], fsdp_launcher: Callable[..., Any]
) -> None:
    assert ddp_launcher(train_step).strategy == "ddp"
    assert deepspeed_launcher(train_step, stage=2).strategy == "zero2"
    assert fsdp_launcher(train_step, version=2, options={"auto_wrap_policy": "NO_WRAP"}).strategy == "fsdp2"
