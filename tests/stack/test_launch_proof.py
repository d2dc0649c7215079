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
