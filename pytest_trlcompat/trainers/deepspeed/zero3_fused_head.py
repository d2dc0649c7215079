"""Cure of ``grpo-zero3-no-gather``: a fused output head that DeepSpeed has at hand in the backward pass.

TRL multiplies by the output head's weight in the forward pass of the whole model, without a call of the head. DeepSpeed
learns of such a parameter when it is read while it is sharded: it then belongs to that module as well, and is gathered
for its backward pass. Where generation has passed through DeepSpeed's hooks, the weight may have been fetched ahead of
time, as in generation: DeepSpeed learns nothing, and the weight's gradient meets a shard: ``The size of tensor a (0)
must match the size of tensor b``. The cure tells DeepSpeed, by its own ``register_external_parameter``.

Gathered is one parameter, the head's, while the model's forward or backward pass lasts: as where TRL gathers the policy
to generate, and DeepSpeed learns of it by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import TRANSFORMERS_GENERATES, ZERO3, Condition, trains_adapters, under
from pytest_trlcompat.trainers.curing.cure import Activity
from pytest_trlcompat.trainers.curing.patching import PatchPoint
from pytest_trlcompat.trainers.curing.upstream import AroundGeneration, class_uses

__all__ = ["ZeRO3FusedHeadMixin"]

REGISTER_EXTERNAL = PatchPoint("deepspeed.runtime.zero.partition_parameters:register_external_parameter")


class ZeRO3FusedHeadMixin(AroundGeneration):
    """Lets a subclass of ``trl.GRPOTrainer`` train under ZeRO-3 with ``ds3_gather_for_generation=False``.

    Known by looking whether one of the trainer's classes gives the model a fused head. Does nothing for a head that is
    not trained: it has no gradient.
    """

    _kinds: ClassVar = {
        "grpo": ("ZeRO3GenerationMixin", "its _around_generation calls this one's"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.ADD_FUSED_HEAD, REGISTER_EXTERNAL)
    _needed: ClassVar = (ZERO3, TRANSFORMERS_GENERATES)
    model: Any

    @contextmanager
    def _around_generation(self) -> Iterator[None]:
        if ZeRO3FusedHeadMixin._activity(type(self), self).active:
            _register_head(self.model)
        with super()._around_generation():
            yield

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        # Before any look at code: it is asked in every step.
        conditions = (*cls._needed, _NOT_GATHERED, _HEAD_TRAINED)
        known = under(trainer, "the output head's weight is used without a call of the head", *conditions)
        if known.active is False or class_uses(trainer_class, "add_fused_lm_head"):
            return known
        return Activity(False, "upstream calls the output head, which DeepSpeed gathers as any module")


def _with_head(model: Any) -> Any:
    """The model that TRL gives a fused head: beneath an adapter."""
    return model.get_base_model() if trains_adapters(model) else model


def _register_head(model: Any) -> None:
    """Have DeepSpeed gather the output head's parameters with the model; again changes nothing."""
    register = import_module("deepspeed").zero.register_external_parameter
    causal = _with_head(model)
    for parameter in causal.get_output_embeddings().parameters():
        register(causal, parameter)


_NOT_GATHERED = Condition(
    "with ds3_gather_for_generation=False",
    "the policy is gathered to generate",
    lambda trainer: not getattr(trainer.args, "ds3_gather_for_generation", True),
)
_HEAD_TRAINED = Condition(
    "with an output head that is trained",
    "the output head is not trained",
    lambda trainer: any(
        parameter.requires_grad for parameter in _with_head(trainer.model).get_output_embeddings().parameters()
    ),
)
