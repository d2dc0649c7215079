"""What the suites measure inside a rank, with the bodies of :mod:`grpo`: plain numbers for a verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["local_elements", "logged", "placement", "save_model"]


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
