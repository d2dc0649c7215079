"""Cure of ``dpo-liger-ddp``: with Liger's loss under DDP each rank keeps its own gradients.

TRL computes the loss on the model beneath ``DistributedDataParallel``, whose own forward pass is what prepares its
gradients to be averaged. So they are not, without an error, and the models of the ranks drift apart. The cure averages
them after the last micro-batch of a step. Where they have been averaged already, that changes nothing.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import LIGER, Condition, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.upstream import method_uses

__all__ = ["LigerGradientsMixin"]


_LOSSES = ("compute_loss", "_compute_loss_liger", "get_batch_loss_metrics")
_CHOOSES = ("use_liger_kernel", "use_liger_loss")


def _is_ddp(trainer: Any) -> bool:
    wrapped = getattr(trainer, "model_wrapped", None)
    if trainer.accelerator.num_processes == 1 or trainer.accelerator.distributed_type in ("DEEPSPEED", "FSDP"):
        return False
    # Before training begins the model is not wrapped yet.
    return wrapped is None or wrapped is trainer.model or type(wrapped).__name__ == "DistributedDataParallel"


_NEEDED = (LIGER, Condition("under DDP", "not under DDP", _is_ddp))


class LigerGradientsMixin(Cure):
    """Averages the gradients of a subclass of ``transformers.Trainer`` whose loss is Liger's, under DDP.

    It knows by the code of the loss, which unwraps the model. Where it does so and goes through DDP all the same, the
    gradients are equal already.
    """

    # GRPO's loss with Liger goes through DDP.
    _kinds: ClassVar = {
        "trainer": ("LigerSettingsMixin", "neither calls the other; cures of one topic stand together"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.TRAINING_STEP,)
    _needed: ClassVar = _NEEDED
    accelerator: Any
    model: Any

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        loss = upstream.training_step(*args, **kwargs)
        if (
            self.accelerator.sync_gradients
            and all(condition.holds(self) for condition in _NEEDED)
            and _unwraps(type(self))
        ):
            _average([parameter for parameter in self.model.parameters() if parameter.requires_grad])
        return loss

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if not _unwraps(trainer_class):
            return Activity(False, "the loss is not computed beside DDP")
        return under(trainer, "the loss is computed beside DDP, which then averages no gradients", *_NEEDED)


def _unwraps(cls: type) -> bool:
    """Whether the loss takes the model out of what wraps it, in the method that asks whether to take Liger's."""
    return any(
        method_uses(cls, method, "unwrap_model")
        and any(method_uses(cls, "compute_loss", name) or method_uses(cls, method, name) for name in _CHOOSES)
        for method in _LOSSES
    )


def _average(parameters: list[Any]) -> None:
    """Over all ranks. One that has no gradient on this rank may have one on another."""
    import torch
    from torch import distributed

    for parameter in parameters:
        # Every rank has to take part in each collective, also with nothing to add.
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        distributed.all_reduce(gradient)
        gradient /= distributed.get_world_size()
        # With a gradient on no rank it stays None: of a gradient of zeros AdamW would decay the weight.
        if parameter.grad is None and bool(gradient.any()):
            parameter.grad = gradient
