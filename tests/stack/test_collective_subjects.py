"""Ranks that gather or reduce different parameters of equal size: both are named, before a number is wrong.

Each engine is also seen to say what its collectives are of, since one that says nothing is compared by shapes alone.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from pytest_trlcompat.launch import Launcher, LaunchError


def build(strategy: str) -> Any:
    """Two layers of the same shape, of which each rank may use another; sharded as the strategy says."""
    import torch
    from torch import nn

    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in ("left", "right")})

        def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
            chosen: torch.Tensor = self.experts[name](x)
            return chosen

    model = Choice()
    if strategy.startswith("zero"):
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": int(strategy[-1]), "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return deepspeed.initialize(model=model, config=config, optimizer=optimizer)[0]
    from accelerate import PartialState

    device = PartialState().device
    if strategy == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(model.to(device), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    from torch.distributed.fsdp import fully_shard

    for layer in model.to(device).experts.values():
        fully_shard(layer)
    return fully_shard(model)


def step(strategy: str, names: tuple[str, str]) -> list[str]:
    """One step, in which rank ``r`` uses the layer ``names[r]``; returns what collectives were said to be of."""
    import torch

    from pytest_trlcompat.launch.subjects import Subjects

    told: list[str] = []

    def tell(subject: str) -> str:
        told.append(subject)
        return ""

    Subjects(tell).install()  # around those of the launch, which go on telling the backend
    engine = build(strategy)
    x = torch.ones(2, 8, device=next(iter(engine.parameters())).device)
    loss = engine(x, names[int(os.environ["RANK"])]).square().sum()
    if strategy.startswith("zero"):
        engine.backward(loss)
        engine.step()
    else:
        loss.backward()
    return list(dict.fromkeys(filter(None, told)))


GATHERED = {
    "zero3": "the parameters experts.{}.weight",
    "fsdp1": "the parameters of FSDP1's unit {}, weight",
    "fsdp2": "the parameters of FSDP2's group experts.{}",
}
REDUCED = {
    "zero1": "the gradients of experts.{}.weight",
    "zero2": "the gradients of experts.{}.weight",
    "zero3": "the gradients of experts.{}.weight",
    "fsdp1": "the gradients of FSDP1's unit {}, weight",
    "fsdp2": "the gradients of FSDP2's group experts.{}",
}

LAYERS = {strategy: ("0", "1") if strategy == "fsdp1" else ("left", "right") for strategy in REDUCED}
"""How each engine calls the layers."""


@pytest.mark.parametrize("strategy", REDUCED)
def test_engines_say_what_their_collectives_are_of(launcher: Launcher, strategy: str) -> None:
    for rank in launcher(step, strategy, ("left", "left"), strategy=strategy).values:
        for texts in (GATHERED, REDUCED):
            if strategy in texts:
                assert texts[strategy].format(LAYERS[strategy][0]) in rank


@pytest.mark.fault(
    "Two ranks gather, or reduce the gradients of, different parameters of equal size.",
    "Both raise before anything is exchanged, and each names both parameters.",
)
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "fsdp1", "fsdp2"])
def test_ranks_that_use_different_parameters_name_both(launcher: Launcher, strategy: str) -> None:
    with pytest.raises(LaunchError) as caught:
        launcher(step, strategy, ("left", "right"), strategy=strategy, timeout=60)
    result = caught.value.result
    assert result is not None
    assert not result.timed_out
    texts = {**REDUCED, **GATHERED}  # what differs first
    for rank in range(2):
        own, other = LAYERS[strategy][rank], LAYERS[strategy][1 - rank]
        failure = result.ranks[rank].failure
        assert failure is not None
        assert f"Rank {rank} is running OpType=" in failure.message
        assert f"of {texts[strategy].format(own)}, TensorShape=" in failure.message
        assert f"of {texts[strategy].format(other)}, TensorShape=" in failure.message
