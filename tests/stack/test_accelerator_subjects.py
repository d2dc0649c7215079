"""Ranks that gather different parameters of equal size are told so, in that collective, with both names."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from pytest_trlcompat.launch import Launcher, LaunchError

from .test_accelerator_ranks import join, zero3_engine
from .test_launch_faults import have_no_notes


def experts_of_zero3() -> float:
    """One step of a model whose ranks route to different experts; its loss."""
    import torch
    from torch import nn

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))

        def forward(self, rows: Any) -> Any:
            return self.experts[int(os.environ["RANK"])](rows)

    model = Mixture()
    engine = zero3_engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = engine(torch.ones(1, 8, device=engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss)


def whole_parameters_of_zero3() -> None:
    """Another call of DeepSpeed's gathers."""
    import deepspeed
    import torch
    from torch import nn

    model = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})
    engine = zero3_engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    module = model[["first", "second"][engine.global_rank]]
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        pass


def units_of_fsdp1() -> None:
    import torch
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel

    rank = join(torch)
    models = [nn.Sequential(), nn.Sequential()]
    for name, model in zip(("first", "second"), models, strict=True):
        model.add_module(name, nn.Linear(4, 4, bias=False))
    wrapped = [FullyShardedDataParallel(model, device_id=torch.device("npu", rank)) for model in models]
    with FullyShardedDataParallel.summon_full_params(wrapped[rank]):
        pass


def groups_of_fsdp2() -> None:
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    rank = join(torch)
    model: Any = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).to(f"npu:{rank}")
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model(torch.ones(1, 4, device=f"npu:{rank}"))  # names its groups
    for layer in model:
        layer.reshard()
    model[rank].unshard()


CASES = [
    (experts_of_zero3, ("parameter experts.0.weight (number 0)", "parameter experts.1.weight (number 1)")),
    (
        whole_parameters_of_zero3,
        ("the first first.weight (number 0), the last first.bias (number 1)", "the first second.weight (number 2)"),
    ),
    (units_of_fsdp1, ("parameter first.weight of Sequential", "parameter second.weight of Sequential")),
    (groups_of_fsdp2, ("parameters of 0 (FSDPLinear)", "parameters of 1 (FSDPLinear)")),
]


@pytest.mark.parametrize(("body", "subjects"), CASES)
def test_different_parameters_of_equal_size(
    launcher: Launcher, body: Callable[[], Any], subjects: tuple[str, str]
) -> None:
    strategy = "zero3" if "zero3" in body.__name__ else body.__name__[-5:]
    with pytest.raises(LaunchError, match="Detected mismatch between collectives on ranks") as caught:
        launcher(body, strategy=strategy, sharded=False, timeout=60)
    assert [subject for subject in subjects if subject not in str(caught.value)] == []


def test_ranks_on_several_machines_compare_it_too(launcher: Launcher) -> None:
    def train() -> None:
        have_no_notes("several machines")
        experts_of_zero3()

    with pytest.raises(LaunchError, match="Detected mismatch between collectives on ranks") as caught:
        launcher(train, strategy="zero3", sharded=False, timeout=60)
    assert "parameter experts.0.weight" in str(caught.value)
    assert "parameter experts.1.weight" in str(caught.value)


def test_what_was_said_ends_with_the_call_and_belongs_to_its_thread(launcher: Launcher) -> None:
    def look() -> list[str]:
        import threading

        from torch_npu import _subjects

        seen = []

        def say() -> str:
            return str(getattr(_subjects._said, "subject", ""))

        inner = _subjects._saying_what(lambda: seen.append(say()), lambda: "inner")

        def work() -> None:
            inner()
            seen.append(say())
            other = threading.Thread(target=lambda: seen.append(say()))
            other.start()
            other.join()

        _subjects._saying_what(work, lambda: "outer")()
        return [*seen, say()]

    assert launcher(look, strategy="single").values == [["inner", "outer", "", ""]]
