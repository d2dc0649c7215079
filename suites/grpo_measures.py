"""What the suites measure inside a rank, with the bodies of :mod:`grpo`: plain numbers for a verdict.

Imports the stack only inside functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import grpo

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["fsdp_reference", "save_model"]


def save_model(model: TinyModel) -> str:
    """Save it once, in one process, for all launches: in several ranks some releases save on the first alone."""
    return str(model.path)


def fsdp_reference(subject: str, model: TinyModel) -> dict[str, Any]:
    """Where and how sharded the reference model is, and three training steps.

    A failure of the training is returned, not raised, so that the placement is known all the same.
    """
    grpo.fix_completions(model.vocab_size)
    losses: list[float] = []

    class Recording(grpo.trainer_class(subject)):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.detach().float().item())
            return loss

    trainer = grpo.build_trainer(subject, model, cls=Recording)
    measured = _placement(trainer)
    measured["failure"] = None
    try:
        trainer.train()
    except Exception as error:
        measured["failure"] = f"{type(error).__name__}: {str(error)[:300]}"
    return {
        **measured,
        "losses": losses,
        "kl": _logged(trainer, "kl"),
        "grad_norm": _logged(trainer, "grad_norm"),
        "local_after": _local_elements(trainer.ref_model),
    }


def _placement(trainer: Any) -> dict[str, Any]:
    ref = trainer.ref_model
    return {
        "ref_class": type(ref).__name__,
        "ref_bases": [base.__name__ for base in type(ref).__mro__],
        "ref_devices": sorted({parameter.device.type for parameter in ref.parameters()}),
        "device": trainer.accelerator.device.type,
        "local": _local_elements(ref),
        "training": ref.training,
        "requires_grad": any(parameter.requires_grad for parameter in ref.parameters()),
    }


def _local_elements(module: Any) -> int:
    """Number of parameter elements that this rank holds."""
    shards = (shard.to_local() if hasattr(shard, "to_local") else shard for shard in module.parameters())
    return sum(shard.numel() for shard in shards)


def _logged(trainer: Any, key: str) -> list[float]:
    return [float(entry[key]) for entry in trainer.state.log_history if entry.get(key) is not None and "loss" in entry]
