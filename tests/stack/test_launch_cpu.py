"""Launches on the plain CPU: each strategy that the libraries have there, and the refusal of the others by name.

Accelerate has DDP alone on the CPU, and takes the others' settings for DDP; PyTorch and DeepSpeed have them there.
"""

from __future__ import annotations

from typing import Any

import pytest

from pytest_trlcompat.launch import Launcher, LaunchError

from .launch_bodies import ELEMENTS, train_step

WITHOUT_WRAPPING = {"auto_wrap_policy": "NO_WRAP"}
SHARDED = {"fsdp1": ELEMENTS // 2, "fsdp2": ELEMENTS // 2, "zero1": ELEMENTS, "zero2": ELEMENTS, "zero3": ELEMENTS // 2}
"""The elements that each of two ranks holds of the parameters."""


def options(strategy: str) -> dict[str, Any]:
    return WITHOUT_WRAPPING if strategy.startswith("fsdp") else {}


def train_by_torch(strategy: str) -> list[float]:
    """Losses over the rows of all ranks, in three steps of SGD without Accelerate."""
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))
    if strategy != "single":
        dist.init_process_group("gloo")
    rank, size = (dist.get_rank(), dist.get_world_size()) if strategy != "single" else (0, 1)
    model, step = engine(strategy, model)
    rows = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).chunk(size)[rank]
    losses = []
    for _ in range(3):
        loss = (model(rows) - 1).square().mean()
        step(loss)
        average = loss.detach().clone()
        if size > 1:
            dist.all_reduce(average)
        losses.append(average.item() / size)
    return losses


def engine(strategy: str, model: Any) -> tuple[Any, Any]:
    """The model under the strategy, and a function that makes one step of a loss."""
    import torch

    if strategy.startswith("zero"):
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": int(strategy[-1]), "stage3_param_persistence_threshold": 0},
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        wrapped = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

        def step_by_engine(loss: Any) -> None:
            wrapped.backward(loss)
            wrapped.step()

        return wrapped, step_by_engine
    if strategy == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    elif strategy == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        fully_shard(model, mesh=mesh)
    elif strategy == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(loss: Any) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return model, step


def test_ddp_of_accelerate_computes_what_the_accelerator_computes(launcher: Launcher) -> None:
    """With torch 2.13 the constructor of DDP ended by SIGSEGV, by a variable that launches set."""
    found = launcher(train_step, strategy="ddp", device="cpu")
    expected = launcher(train_step, strategy="ddp").values[0]["losses"]
    for rank in found.ranks:
        assert rank.value["device"].startswith("cpu")
        engines = rank.proof["engines"]
        assert {name: (entry["count"], entry["local"]) for name, entry in engines.items()} == {"ddp": (1, ELEMENTS)}
        assert rank.value["losses"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", *SHARDED])
def test_engines_of_torch_and_deepspeed_are_proved_and_compute_the_same(launcher: Launcher, strategy: str) -> None:
    # DeepSpeed compiles what it sums with once per environment. A rank that is ended meanwhile leaves a lock for which
    # later ones wait for ever, before torch 2.15.
    found = launcher(train_by_torch, strategy, strategy=strategy, options=options(strategy), device="cpu", timeout=600)
    (expected,) = launcher(train_by_torch, "single", strategy="single", device="cpu").values
    assert expected[0] - expected[-1] > 0.001
    name = "deepspeed" if strategy.startswith("zero") else strategy
    for rank in found.ranks:
        proof = rank.proof["engines"][name]
        assert (proof["local"], proof["total"]) == (SHARDED.get(strategy, ELEMENTS), ELEMENTS)
        assert proof["device_type"] == "cpu"
        assert rank.value == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("strategy", SHARDED)
def test_what_accelerate_does_not_have_there_is_refused_by_name(launcher: Launcher, strategy: str) -> None:
    with pytest.raises(LaunchError) as caught:
        launcher(train_step, strategy=strategy, options=options(strategy), device="cpu")
    if "There are currently no available devices found" in str(caught.value):
        assert strategy == "fsdp1"  # whose plug-in looks for an accelerator as soon as it is made
        return
    name = "deepspeed" if strategy.startswith("zero") else strategy
    assert "was requested, MULTI_CPU was found" in str(caught.value)
    assert f"no {name} engine was built (built: ddp)" in str(caught.value)


def disagree() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    dist.all_reduce(torch.ones(2 + dist.get_rank()))


def disagree_in_a_group_of_two() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    rank = dist.get_rank()
    if rank == 0:
        dist.all_reduce(torch.ones(2), group=groups[0])
    elif rank == 1:
        dist.broadcast(torch.ones(2), 0, group=groups[0])


@pytest.mark.parametrize(
    ("body", "size", "texts"),
    [
        (disagree, 2, ("OpType=ALLREDUCE, TensorShape=[2]", "OpType=ALLREDUCE, TensorShape=[3]")),
        (disagree_in_a_group_of_two, 3, ("OpType=ALLREDUCE, TensorShape=[2]", "OpType=BROADCAST, TensorShape=[2]")),
    ],
)
def test_collectives_are_compared(launcher: Launcher, body: Any, size: int, texts: tuple[str, str]) -> None:
    with pytest.raises(LaunchError, match="Detected mismatch between collectives on ranks") as caught:
        launcher(body, strategy="ddp", world_size=size, device="cpu", sharded=False, timeout=60)
    assert all(text in str(caught.value) for text in texts)


@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
def test_the_level_of_debugging_is_the_users(
    launcher: Launcher, ddp_losses_on_the_cpu: list[float], level: str
) -> None:
    def train() -> tuple[str, Any]:
        import torch.distributed as dist

        losses = train_step()["losses"]
        return dist.get_debug_level().name, losses

    found = launcher(train, strategy="ddp", device="cpu", env={"TORCH_DISTRIBUTED_DEBUG": level})
    assert found.values == [(level, ddp_losses_on_the_cpu)] * 2


@pytest.fixture(scope="module")
def ddp_losses_on_the_cpu(launcher: Launcher) -> list[float]:
    losses: list[float] = launcher(train_step, strategy="ddp", device="cpu").values[0]["losses"]
    return losses
