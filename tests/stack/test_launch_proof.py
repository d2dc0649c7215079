"""The proof of a launch is taken while its engines live, however the function ends."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_trlcompat.launch import Launcher, LaunchError

from .launch_bodies import ELEMENTS, train_step

ENGINES = {"ddp": "ddp", "zero3": "deepspeed", "fsdp1": "fsdp1", "fsdp2": "fsdp2"}
OPTIONS: dict[str, dict[str, Any]] = {name: {"auto_wrap_policy": "NO_WRAP"} for name in ("fsdp1", "fsdp2")}


def destroy() -> None:
    import torch

    train_step()
    torch.distributed.destroy_process_group()


def destroy_by_an_older_name() -> None:
    """As a module does that has imported the function before it was wrapped."""
    import torch

    train_step()
    torch.distributed.destroy_process_group.__wrapped__()


def end_training_and_forget_everything() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    train_step()
    accelerator = Accelerator()
    accelerator.free_memory()
    accelerator.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)


def shrink() -> None:
    """Train with two ranks, and go on in a process group of one."""
    import tempfile

    import torch

    destroy()
    store = f"file://{tempfile.mkdtemp()}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)


@pytest.mark.parametrize("strategy", ENGINES)
@pytest.mark.parametrize("body", [destroy, destroy_by_an_older_name, end_training_and_forget_everything])
def test_a_function_may_end_its_process_group(launcher: Launcher, strategy: str, body: Any) -> None:
    result = launcher(body, strategy=strategy, options=OPTIONS.get(strategy))
    for rank in result.ranks:
        assert (rank.proof["initialized"], rank.proof["world_size"], rank.proof["device_type"]) == (True, 2, "npu")
        assert "distributed_type" in rank.proof
        engine = rank.proof["engines"][ENGINES[strategy]]
        assert (engine["local"], engine["total"]) == (ELEMENTS if strategy == "ddp" else ELEMENTS // 2, ELEMENTS)


@pytest.mark.parametrize("strategy", ENGINES)
def test_a_process_group_of_another_size_is_a_downgrade_all_the_same(launcher: Launcher, strategy: str) -> None:
    with pytest.raises(LaunchError, match="world size 2 was requested, 1 was found"):
        launcher(shrink, strategy=strategy, options=OPTIONS.get(strategy))


@pytest.mark.parametrize("strategy", ENGINES)
def test_without_an_engine_the_processes_are_proved(launcher: Launcher, strategy: str) -> None:
    def destroy_at_once() -> None:
        import torch
        from accelerate import PartialState

        PartialState()
        torch.distributed.barrier()  # a rank that destroys the group breaks the connections of one that still connects
        torch.distributed.destroy_process_group()

    (first, _) = launcher(destroy_at_once, strategy=strategy, sharded=False).ranks
    assert (first.proof["initialized"], first.proof["world_size"]) == (True, 2)


@pytest.mark.versions(
    transformers=">=5", reason="before, some releases fail here by themselves: trl-training-arguments"
)
@pytest.mark.parametrize("strategy", ENGINES)
def test_training_arguments_alone_are_no_downgrade(launcher: Launcher, strategy: str, tmp_path: Any) -> None:
    def make(folder: str) -> None:
        from transformers import TrainingArguments

        TrainingArguments(output_dir=folder, report_to="none")

    (first, _) = launcher(make, str(tmp_path), strategy=strategy, sharded=False).ranks
    assert first.proof["world_size"] == 2


# ---- several engines in a launch


def wrap(kind: str, model: Any, rank: int, **settings: Any) -> Any:
    """The model in an engine of the kind, on ``npu:<rank>``."""
    import torch

    device = torch.device("npu", rank)
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model.to(device), **settings)
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

        sharding = ShardingStrategy[settings.get("sharding", "FULL_SHARD")]
        return FullyShardedDataParallel(model, device_id=device, sharding_strategy=sharding, use_orig_params=True)
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer.to(device))
        return fully_shard(model)
    import deepspeed

    stage = {"stage": int(kind[-1]), **({"stage3_param_persistence_threshold": 0} if kind == "zero3" else {})}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": stage}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained) if trained else None
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def build(*engines: tuple[str, bool, dict[str, Any]]) -> None:
    """Engines in their order: kind, whether what it holds can be trained, and settings."""
    import os

    import torch
    from torch import nn

    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    torch.distributed.init_process_group("hccl")
    for kind, trainable, settings in engines:
        model: Any = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4))).requires_grad_(trainable)
        wrap(kind, model, rank, **settings)


WHOLE = {"sharding": "NO_SHARD"}


@pytest.mark.parametrize(
    ("strategy", "engines", "text"),
    [
        ("fsdp1", [("fsdp1", True, WHOLE), ("fsdp1", False, {})], "the fsdp1 engine of the trainable Sequential"),
        ("fsdp1", [("fsdp1", True, {}), ("fsdp1", False, WHOLE)], "the fsdp1 engine of the reference model Sequential"),
        ("fsdp1", [("ddp", True, {}), ("fsdp1", False, {})], "the ddp engine of the trainable Sequential"),
        ("fsdp2", [("ddp", True, {}), ("fsdp2", False, {})], "the ddp engine of the trainable Sequential"),
        ("fsdp2", [("fsdp2", True, {}), ("fsdp1", False, {})], "the fsdp1 engine of the reference model Sequential"),
        ("ddp", [("ddp", True, {}), ("fsdp1", False, {})], "the fsdp1 engine of the reference model Sequential"),
        (
            "zero3",
            [("zero3", True, {}), ("zero0", False, {})],
            "the deepspeed engine of the reference model Sequential",
        ),
        ("zero2", [("zero2", True, {}), ("zero0", True, {})], "the deepspeed engine of the trainable Sequential"),
    ],
)
def test_one_engine_does_not_prove_another(
    launcher: Launcher, strategy: str, engines: list[tuple[str, bool, dict[str, Any]]], text: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        launcher(build, *engines, strategy=strategy)
    assert f"did not run under strategy {strategy!r} as requested: {text}" in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "kinds", "local"),
    [
        ("ddp", ("ddp", "ddp"), ELEMENTS),
        ("fsdp1", ("fsdp1", "fsdp1"), ELEMENTS // 2),
        ("fsdp2", ("fsdp2", "fsdp2"), ELEMENTS // 2),
        ("zero2", ("zero2", "zero0"), ELEMENTS),
        ("zero3", ("zero3", "zero3"), ELEMENTS // 2),
    ],
)
def test_each_engine_as_requested_is_proved(
    launcher: Launcher, strategy: str, kinds: tuple[str, str], local: int
) -> None:
    is_ddp = strategy == "ddp"  # which refuses a model without parameters to train
    result = launcher(build, (kinds[0], True, {}), (kinds[1], is_ddp, {}), strategy=strategy)
    for rank in result.ranks:
        found = [(one["local"], one["total"], one["trainable"]) for one in rank.proof["built"]]
        assert found == [(local, ELEMENTS, True), (local, ELEMENTS, is_ddp)]
        assert sum(entry["total"] for entry in rank.proof["engines"].values()) == 2 * ELEMENTS


def test_an_engine_that_one_rank_alone_built(launcher: Launcher) -> None:
    def build_more_on_rank_0() -> None:
        import torch
        import torch.distributed as dist

        build(("ddp", True, {}))
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        if dist.get_rank() == 0:
            wrap("ddp", torch.nn.Linear(2, 2, bias=False), 0, process_group=alone)

    with pytest.raises(LaunchError) as caught:
        launcher(build_more_on_rank_0, strategy="ddp")
    assert "first observed failure: rank 1 raised NotProved" in str(caught.value)
    policy = "ddp of the trainable Sequential with 4096 elements"
    assert (
        f"ranks built different engines: rank 0 built {policy}, ddp of the trainable Linear with 4 elements; "
        f"rank 1 built {policy}" in str(caught.value)
    )


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_policy_in_no_engine_beside_a_sharded_reference_model(launcher: Launcher, is_trained: bool) -> None:
    def train_beside(is_trained: bool) -> Any:
        import torch

        build(("fsdp1", False, {}))
        policy = torch.nn.Linear(2, 2)
        return torch.optim.SGD(policy.parameters(), lr=0.1) if is_trained else None

    def launch() -> None:
        # Held by a global name, as a trainer holds it, until the proof is taken.
        launcher(held, train_beside, is_trained, strategy="fsdp1")

    def held(body: Any, is_trained: bool) -> None:
        import builtins

        builtins.held_until_the_proof = body(is_trained)  # type: ignore[attr-defined]

    if not is_trained:
        launch()
        return
    with pytest.raises(LaunchError, match="no engine holds a model that can be trained, and an optimizer has 2 param"):
        launch()
