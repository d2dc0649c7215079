"""Weights of a model as they are before any wrapper shards or renames them.

Runs inside a rank.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["bare_name", "gathered", "is_sharded", "whole", "whole_trained"]

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def gathered(
    parameters: Iterable[torch.nn.Parameter], modifier_rank: int | None = None
) -> contextlib.AbstractContextManager[Any]:
    """A context in which parameters are whole: DeepSpeed's where ZeRO-3 has partitioned them. Collective there."""
    to_gather = list(parameters)  # it is read twice, and may be an iterator
    if any(hasattr(parameter, "ds_id") for parameter in to_gather):
        import deepspeed

        context: contextlib.AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
            to_gather, modifier_rank=modifier_rank
        )
        return context
    return contextlib.nullcontext()


def whole(model: Any) -> dict[str, torch.Tensor]:
    """Every parameter, gathered, in float32 on the CPU, under its name in the bare model.

    Of a parameter that DeepSpeed trains in bfloat16: the float32 copy that its optimizer steps.
    """
    with _summoned(model):
        weights = {}
        for name, parameter in model.named_parameters():
            # One at a time: DeepSpeed before 0.19.3 gathers one dtype at once.
            with gathered([parameter]):
                weights[bare_name(name)] = _float32(parameter)
        return weights


def _float32(parameter: torch.nn.Parameter) -> torch.Tensor:
    import torch

    # ZeRO-1 and ZeRO-2 mark such parameters by _hp_mapping, ZeRO-3 marks all by ds_id.
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


def is_sharded() -> bool:
    """Whether the launch's strategy shards weights or hides gradients."""
    return any(os.environ.get(name) == "true" for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"))


def whole_trained(trainer: Any) -> dict[str, torch.Tensor]:
    """The trained parameters of a trainer, gathered, in float32, under their names in the bare model. Collective."""
    trained = {bare_name(name) for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    return {name: weight for name, weight in whole(trainer.model_wrapped).items() if name in trained}
