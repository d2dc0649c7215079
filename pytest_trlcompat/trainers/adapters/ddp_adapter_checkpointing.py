"""Cure of ``lora-ddp-checkpointing``: adapters under DDP with reentrant checkpointing.

Transformers asks DDP to look for parameters that got no gradient, except of a model of its own that checkpoints, since
both do not go together: reentrant checkpointing runs each layer's backward pass by itself, and DDP takes its parameters
for ready twice: ``Expected to mark a variable ready only once``. A ``PeftModel`` is none of Transformers' own models.
The cure wraps it as Transformers wraps its own.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pytest_trlcompat.trainers.adapters.adapter_checkpointing import is_reentrant
from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import ADAPTER, CHECKPOINTING, Condition, trains_adapters, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.upstream import method_uses

__all__ = ["DDPAdapterCheckpointingMixin"]


class DDPAdapterCheckpointingMixin(Cure):
    """Lets a subclass of ``transformers.Trainer`` train adapters under DDP with reentrant checkpointing.

    It knows by the keywords that the layers have when the model is wrapped. Does nothing without them, where
    ``ddp_find_unused_parameters`` says what is wanted, and with Transformers 5, which decides elsewhere and checkpoints
    otherwise by default.
    """

    _kinds: ClassVar = {
        "trainer": ("AdapterCheckpointingMixin", "its _wrap_model calls this one's"),
        "grpo": ("ZeRO3MixedDtypesMixin", "neither calls the other; it was measured here"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.WRAP_MODEL,)
    args: Any

    def _wrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        if self.args.ddp_find_unused_parameters is not None or not _reenters(model):
            return upstream._wrap_model(model, *args, **kwargs)
        # What Transformers decides for its own models that checkpoint; the user's arguments stay as they were.
        self.args.ddp_find_unused_parameters = False
        try:
            return upstream._wrap_model(model, *args, **kwargs)
        finally:
            self.args.ddp_find_unused_parameters = None

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        from transformers import Trainer

        if not method_uses(Trainer, "_wrap_model", "find_unused_parameters"):
            return Activity(False, "Transformers decides elsewhere, and does not checkpoint reentrantly by default")
        if trainer is not None and trainer.args.ddp_find_unused_parameters is not None:
            return Activity(False, "ddp_find_unused_parameters is set")
        why = "Transformers has DDP look for unused parameters, unless checkpointing is not reentrant"
        return under(trainer, why, _DDP, CHECKPOINTING, ADAPTER)


def _reenters(model: Any) -> bool:
    return trains_adapters(model) and is_reentrant(model)


def _is_ddp(trainer: Any) -> bool:
    # Accelerate has a type of DDP for each kind of device: MULTI_GPU, MULTI_CPU, MULTI_NPU. FSDP is another type.
    return str(getattr(trainer.accelerator.distributed_type, "value", "")).startswith("MULTI_")


_DDP = Condition("under DDP", "not under DDP", _is_ddp)
