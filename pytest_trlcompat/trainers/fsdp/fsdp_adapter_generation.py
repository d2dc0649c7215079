"""Cure of ``lora-fsdp2-generation`` and ``distillation-lora-fsdp2-generation``: adapters under FSDP2 generate with the
root's parameters gathered.

FSDP2 gathers the parameters that belong to no layer (embeddings, final norm, output head) when the root module is
called. A ``PeftModel`` that is the root generates with the model beneath it, for which they stay sharded:
``aten.embedding.default got mixed torch.Tensor and DTensor``. Without adapters the root itself generates. The cure
registers ``generate`` with FSDP2, as ``forward`` is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import nn

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import ADAPTER, FSDP2, TRANSFORMERS_GENERATES, under
from pytest_trlcompat.trainers.curing.cure import Activity
from pytest_trlcompat.trainers.curing.upstream import AroundGeneration

__all__ = ["FSDPAdapterGenerationMixin", "gather_to_generate"]


def gather_to_generate(model: nn.Module) -> None:
    """Let FSDP2 gather the root's parameters for ``model.generate`` as it does for ``model.forward``, for good.

    Layers stay sharded and are gathered one at a time as ever. Where it does so already, nothing is changed.

    Args:
        model: a root that ``fully_shard`` has been given.

    Raises:
        ValueError: FSDP2 has not sharded it.
    """
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

    if not isinstance(model, FSDPModule):
        raise ValueError(f"FSDP2 has not sharded this {type(model).__name__}; call fully_shard first")
    # Where it is registered with FSDP already, the model has a `generate` of its own.
    if "generate" not in vars(model):
        register_fsdp_forward_method(model, "generate")


class FSDPAdapterGenerationMixin(AroundGeneration):
    """Lets ``trl.GRPOTrainer``, ``RLOOTrainer`` and ``DistillationTrainer`` generate with adapters under FSDP2.

    It knows by the model whether a newer ``Trainer`` has done the same. Does nothing without adapters, under another
    strategy, or with vLLM, which generates elsewhere.
    """

    _kinds: ClassVar = {
        "grpo": ("FSDPGenerationMixin", "its _around_generation calls this one's"),
        "rloo": ("", "of RLOO alone: in front of what any trainer gets"),
        "distillation": ("", "of distillation alone: in front of what any trainer gets"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.GENERATION,)
    _needed: ClassVar = (FSDP2, ADAPTER, TRANSFORMERS_GENERATES)
    accelerator: Any
    args: Any
    model: Any

    @contextmanager
    def _around_generation(self) -> Iterator[None]:
        if FSDPAdapterGenerationMixin._activity(type(self), self).active:
            gather_to_generate(self.model)
        with super()._around_generation():
            yield

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        return under(trainer, "adapters generate beneath FSDP2's root", *cls._needed)
