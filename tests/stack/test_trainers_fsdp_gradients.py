"""The cure for gradients that are lost under FSDP1 ``NO_SHARD`` when units run without their root."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_trlcompat.launch import Launcher

pytest.importorskip("trl")

NO_SHARD = {"sharding_strategy": "NO_SHARD"}


def accumulate(cured: bool, middle: bool) -> dict[str, list[float]]:
    """Gradient norms of two steps of two batches, FSDP1's and a plain model's; units run alone before the second.

    Args:
        middle: they run alone between the two batches as well, where there are gradients to be kept.
    """
    import contextlib

    import torch
    from accelerate import Accelerator
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    from pytest_trlcompat.trainers.fsdp.fsdp_gradients import forget_zeroed_gradients

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    accelerator = Accelerator()
    settings: Any = {
        "use_orig_params": True,
        "sharding_strategy": ShardingStrategy.NO_SHARD,
        "device_id": accelerator.device,
    }
    plain, parts = build(), build()
    parts[0], parts[2] = (FullyShardedDataParallel(parts[at], **settings) for at in (0, 2))
    model = FullyShardedDataParallel(parts, **settings)

    def run_units() -> None:
        if cured:
            forget_zeroed_gradients(model)
        with torch.no_grad():
            model.module(torch.ones(1, 8, device=accelerator.device))

    norms: dict[str, list[float]] = {"plain": [], "fsdp": []}
    data = torch.randn(2, 2, 2, 4, 8, generator=torch.Generator().manual_seed(1))  # step, batch, rank
    for step in data:
        if norms["fsdp"]:
            run_units()
        for number, batch in enumerate(step):
            if number and middle:
                run_units()
            for rows in batch:
                (plain(rows).pow(2).mean() / 4).backward()
            with model.no_sync() if number == 0 else contextlib.nullcontext():
                own = batch[accelerator.process_index].to(accelerator.device)
                (model(own).pow(2).mean() / 2).backward()
        norms["plain"].append(nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item())
        norms["fsdp"].append(float(model.clip_grad_norm_(1e9)))
        plain.zero_grad()
        model.zero_grad()
    return norms


@pytest.mark.parametrize("middle", [False, True])
def test_accumulated_gradients_all_count(launch: Launcher, middle: bool) -> None:
    for rank in launch(accumulate, True, middle, strategy="fsdp1", options=NO_SHARD).values:
        assert rank["fsdp"] == pytest.approx(rank["plain"], rel=1e-5)


def test_without_the_cure_the_first_batch_is_lost(launch: Launcher) -> None:
    """Fails when FSDP1 keeps them by itself: then the cure has gone stale."""
    for rank in launch(accumulate, False, False, strategy="fsdp1", options=NO_SHARD).values:
        assert rank["fsdp"][0] == pytest.approx(rank["plain"][0], rel=1e-5)
        assert rank["fsdp"][1] < 0.9 * rank["plain"][1]


@pytest.mark.parametrize(("wrapped", "use_vllm", "calls"), [(False, False, 0), (True, True, 0), (True, False, 1)])
def test_it_acts_for_models_that_are_wrapped_so_only(
    monkeypatch: pytest.MonkeyPatch, wrapped: bool, use_vllm: bool, calls: int
) -> None:
    from contextlib import nullcontext

    from torch.distributed.fsdp import ShardingStrategy

    from pytest_trlcompat.trainers.fsdp import fsdp_gradients

    module = import_module("trl.trainer.grpo_trainer")

    class Wrapper:
        sharding_strategy = ShardingStrategy.NO_SHARD if wrapped else ShardingStrategy.FULL_SHARD

    forgotten: list[Any] = []
    monkeypatch.setattr(fsdp_gradients, "FullyShardedDataParallel", Wrapper)
    monkeypatch.setattr(fsdp_gradients, "forget_zeroed_gradients", forgotten.append)
    monkeypatch.setattr(module, "unwrap_model_for_generation", lambda model: nullcontext(model))

    class Upstream:
        model_wrapped = Wrapper()
        args = SimpleNamespace(use_vllm=use_vllm)

        def _prepare_inputs(self, inputs: Any) -> Any:
            with module.unwrap_model_for_generation("model") as model:
                return inputs, model

    class Trainer(fsdp_gradients.FSDPGradientsMixin, Upstream):
        pass

    trainer = Trainer()
    assert trainer._prepare_inputs("inputs") == ("inputs", "model")
    assert forgotten == [trainer.model_wrapped] * calls
