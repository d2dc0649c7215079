"""What the suites measure inside a rank, with the bodies of :mod:`grpo`: plain numbers for a verdict.

Imports the stack only inside functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

__all__ = ["gathered", "local_elements", "logged", "placement", "save_model"]


def save_model(model: TinyModel) -> str:
    """Save it once, in one process, for all launches: in several ranks some releases save on the first alone."""
    return str(model.path)


def placement(trainer: Any) -> dict[str, Any]:
    """Where the reference model is, how much of it is here, and in which mode."""
    ref = trainer.ref_model
    return {
        "ref_class": type(ref).__name__,
        "ref_bases": [base.__name__ for base in type(ref).__mro__],
        "ref_devices": sorted({parameter.device.type for parameter in ref.parameters()}),
        "device": trainer.accelerator.device.type,
        "local": local_elements(ref),
        "training": ref.training,
        "requires_grad": any(parameter.requires_grad for parameter in ref.parameters()),
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
