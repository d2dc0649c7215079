"""What the suites measure inside a rank, with the bodies of :mod:`grpo`: plain numbers for a verdict.

Imports the stack only inside functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from pytest_trlcompat.tiny import TinyModel

__all__ = ["bare_name", "conformance_model", "gathered", "local_elements", "logged", "placement", "save_model", "whole"]

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def conformance_model(directory: Path | str, seed: int = 0) -> TinyModel:
    """The model that conformance is held with: of one layer, with weights so large that each of them matters."""
    from pytest_trlcompat import tiny

    return tiny.qwen2(initializer_range=0.3, num_hidden_layers=1, seed=seed, directory=directory)


def save_model(model: TinyModel) -> str:
    """Save it once, in one process, for all launches: in several ranks some releases save on the first alone."""
    return str(model.path)


def placement(trainer: Any) -> dict[str, Any]:
    """Where the reference model is, how much of it is here, in which mode, and with which optimizer of an engine's."""
    ref = trainer.ref_model
    optimizer = getattr(ref, "optimizer", None)
    return {
        "ref_class": type(ref).__name__,
        "ref_bases": [base.__name__ for base in type(ref).__mro__],
        "ref_devices": sorted({parameter.device.type for parameter in ref.parameters()}),
        "device": trainer.accelerator.device.type,
        "local": local_elements(ref),
        "training": ref.training,
        "requires_grad": any(parameter.requires_grad for parameter in ref.parameters()),
        # DeepSpeed has an object that only gathers, without groups, in an optimizer's place.
        "ref_optimizer": type(optimizer).__name__ if hasattr(optimizer, "param_groups") else None,
    }


def local_elements(module: Any) -> int:
    """Number of parameter elements that this rank holds."""
    shards = (shard.to_local() if hasattr(shard, "to_local") else shard for shard in module.parameters())
    return sum(shard.numel() for shard in shards)


def logged(trainer: Any, key: str) -> list[float]:
    """What was logged at each step of training."""
    return [float(entry[key]) for entry in trainer.state.log_history if entry.get(key) is not None and "loss" in entry]


def gathered(
    parameters: Iterable[torch.nn.Parameter], modifier_rank: int | None = None
) -> contextlib.AbstractContextManager[Any]:
    """DeepSpeed's context, in which parameters are whole, where ZeRO-3 has partitioned them. Collective there."""
    wanted = list(parameters)
    if any(hasattr(parameter, "ds_id") for parameter in wanted):
        import deepspeed

        context: contextlib.AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
            wanted, modifier_rank=modifier_rank
        )
        return context
    return contextlib.nullcontext()


def whole(model: Any) -> dict[str, torch.Tensor]:
    """Every parameter, gathered, in float32 on the CPU, under its name in the bare model.

    Of those that DeepSpeed trains in bfloat16 its float32 copy, which it steps.
    """
    with _summoned(model):
        found = {}
        for name, parameter in model.named_parameters():
            with gathered([parameter]):  # DeepSpeed before 0.19.3 gathers one dtype at once
                found[bare_name(name)] = _float32(parameter)
        return found


def _float32(parameter: torch.nn.Parameter) -> torch.Tensor:
    import torch

    if parameter.dtype is not torch.float32 and (hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id")):
        from deepspeed.utils import safe_get_full_fp32_param

        whole = safe_get_full_fp32_param(parameter)
        if whole is not None:  # a frozen one has no such copy
            return whole.detach().cpu().clone()
    tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return tensor.detach().float().cpu().clone()


@contextlib.contextmanager
def _summoned(model: Any) -> Iterator[None]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            yield
    else:
        yield


def bare_name(name: str) -> str:
    """A parameter's name in the model as it was before any wrapper."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")
