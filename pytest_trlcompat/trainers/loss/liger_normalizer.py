"""Cure of ``grpo-liger-normalizer``: Liger divides GRPO's loss by the tokens of a micro-batch.

``dapo``, TRL's default, ``cispo`` and ``vespo`` divide by the number of tokens that an optimizer step trains on. Until
TRL hands that number to Liger, Liger counts those of the micro-batch over all ranks, and TRL divides by the number of
micro-batches: where these have unequal numbers of tokens, each has another weight. The cure multiplies the loss by what
both have divided it by, and divides it by the number that TRL counts.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import LIGER, Condition, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.errors import CureError
from pytest_trlcompat.trainers.curing.patching import PatchPoint
from pytest_trlcompat.trainers.curing.upstream import class_uses, method_uses

__all__ = ["LigerNormalizerMixin"]

_LOSS, _COUNT = "compute_liger_loss", "num_items_in_batch"
_BY_TOKENS = ("dapo", "cispo", "vespo")
_BASE = "liger_kernel.chunked_loss.fused_linear_ppo"


class LigerNormalizerMixin(Cure):
    """Has a subclass of ``trl.GRPOTrainer`` with Liger's loss divide by the tokens that a step trains on.

    It knows by the code of ``compute_liger_loss`` whether TRL hands the number on, and asks Liger for its own.
    """

    _kinds: ClassVar = {
        "grpo": ("DeepSpeedAccumulationMixin", "neither calls the other; it was measured here"),
    }
    _points: ClassVar[patch_points.Points] = (
        patch_points.COMPUTE_LOSS,
        patch_points.in_grpo("GRPOTrainer.compute_liger_loss", ">=0.18,<1.13"),
        PatchPoint(
            "liger_kernel.chunked_loss.fused_linear_ppo:LigerFusedLinearPPOBase._compute_dapo_normalizer", ">=0.6.4"
        ),
    )
    _needed: ClassVar = (LIGER,)
    _stands_before: ClassVar = {
        "TokenNormalizerMixin": "it takes the tokens of a whole generation for what it is given"
    }
    accelerator: Any
    args: Any
    model: Any

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        loss = upstream.compute_loss(model, inputs, *args, **kwargs)
        if not self.model.training or not _divides_wrongly(self):
            return loss
        if _COUNT not in inputs:
            raise CureError(
                "LigerNormalizerMixin",
                expected=f"the number of tokens of a step, {_COUNT}, in what the loss is given",
                seen="it is not there",
                packages=("trl", "liger-kernel"),
            )
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        divided = _normalizer_of_liger()(mask)
        accumulated: int = self.current_gradient_accumulation_steps  # type: ignore[attr-defined] # Trainer's
        if method_uses(type(self), _LOSS, "current_gradient_accumulation_steps"):
            divided = divided * accumulated
        # What is counted is of a whole generation.
        tokens = inputs[_COUNT] * accumulated / self.args.steps_per_generation
        # TRL counts the tokens of all ranks, and the strategy takes the mean of the ranks' gradients.
        return loss * divided * self.accelerator.num_processes / tokens

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if not class_uses(trainer_class, _LOSS, but=("transformers.",)):
            return Activity(False, "TRL takes no loss of Liger's")
        if method_uses(trainer_class, _LOSS, _COUNT):
            return Activity(False, "TRL hands Liger the number of tokens of a step")
        return under(trainer, "Liger counts the tokens of a micro-batch", LIGER, _DIVIDED_BY_TOKENS)


_DIVIDED_BY_TOKENS = Condition(
    "where loss_type is dapo, cispo or vespo",
    "loss_type divides by no number of tokens",
    lambda trainer: getattr(trainer, "loss_type", "") in _BY_TOKENS,
)


def _divides_wrongly(trainer: Any) -> bool:
    return (
        LIGER.holds(trainer)
        and _DIVIDED_BY_TOKENS.holds(trainer)
        and class_uses(type(trainer), _LOSS, but=("transformers.",))
        and not method_uses(type(trainer), _LOSS, _COUNT)
    )


def _normalizer_of_liger() -> Any:
    """The function by which Liger finds what it divides by."""
    base = getattr(import_module(_BASE), "LigerFusedLinearPPOBase", None)
    normalizer = getattr(base, "_compute_dapo_normalizer", None)
    if normalizer is None:
        raise CureError(
            "LigerNormalizerMixin",
            expected=f"LigerFusedLinearPPOBase._compute_dapo_normalizer in {_BASE}",
            seen="it is not there",
            packages=("trl", "liger-kernel"),
        )
    return normalizer
