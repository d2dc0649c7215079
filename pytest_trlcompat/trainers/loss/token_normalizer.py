"""Cure of ``grpo-token-normalizer``: the losses of GRPO that divide by the number of tokens.

``dapo``, TRL's default, ``cispo`` and ``vespo`` divide by ``num_items_in_batch``, which TRL counts over the whole
generation batch, truncated completions included. So the gradient shrinks or grows by ``gradient_accumulation_steps /
steps_per_generation`` where these differ, and shrinks where ``mask_truncated_completions`` leaves completions out of
the sum alone. The cure counts what a step trains on.
"""

from __future__ import annotations

import dis
from typing import Any, ClassVar

from torch import Tensor

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.errors import CureError
from pytest_trlcompat.trainers.curing.upstream import class_uses, codes_of, definitions, loss_uses

__all__ = ["TokenNormalizerMixin"]


class TokenNormalizerMixin(Cure):
    """Counts the tokens that a subclass of ``trl.GRPOTrainer`` divides by: those that one optimizer step trains on.

    Where an optimizer step trains on a share of the generation batch, the number is that share of all its tokens, as
    TRL has it in later releases. It knows by the ``num_items_in_batch`` that TRL hands from generation to loss, and by
    the names in the code of ``_compute_loss``.
    """

    _kinds: ClassVar = {
        "grpo": ("LigerNormalizerMixin", "its compute_loss calls this one's"),
    }
    _points: ClassVar[patch_points.Points] = (
        patch_points.GRPO_LOSS,
        patch_points.GENERATE_AND_SCORE,
        patch_points.COMPUTE_LOSS,
    )
    accelerator: Any
    args: Any
    model: Any

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        batch = upstream._generate_and_score_completions(*args, **kwargs)
        # In this order: releases that count no tokens may not have the argument either.
        counts = "num_items_in_batch" in batch
        if counts and self.args.mask_truncated_completions and not _masks_before_it_counts(type(self)):
            mask = batch["completion_mask"]
            if "tool_mask" in batch:
                mask = mask * batch["tool_mask"]
            # Never 0, by which the loss would be NaN where every completion is truncated.
            batch["num_items_in_batch"] = self.accelerator.gather(mask.sum()).sum().clamp(min=1)
        return batch

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        share = self._share_of_generation(inputs)
        if share != 1.0:
            tokens: Tensor = inputs["num_items_in_batch"]
            inputs = {**inputs, "num_items_in_batch": tokens * share}
        return upstream.compute_loss(model, inputs, *args, **kwargs)

    def _share_of_generation(self, inputs: Any) -> float:
        """By what to multiply the number of tokens, where TRL does not."""
        if "num_items_in_batch" not in inputs or not self.model.training:
            return 1.0
        accumulated: int = self.current_gradient_accumulation_steps  # type: ignore[attr-defined] # Trainer's
        share = accumulated / float(self.args.steps_per_generation)
        return 1.0 if share == 1.0 or _shares(type(self)) else share

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if not class_uses(trainer_class, "num_items_in_batch", but=("transformers.",)):
            return Activity(False, "TRL divides no loss by a number of tokens")
        if trainer is None:
            also = "" if _shares(trainer_class) else ", or where a step trains on a share of the generation"
            return Activity(None, f"with mask_truncated_completions{also}: TRL counts the tokens of all completions")
        if trainer.args.mask_truncated_completions and not _masks_before_it_counts(trainer_class):
            return Activity(True, "the tokens of truncated completions are not counted")
        steps, generated = trainer.args.gradient_accumulation_steps, trainer.args.steps_per_generation
        if steps == generated or _shares(trainer_class):
            return Activity(False, "TRL counts the tokens that a step trains on")
        return Activity(True, f"a step trains on {steps}/{generated} of the tokens that TRL counts")


def _shares(cls: type) -> bool:
    """Whether TRL takes of the tokens of a generation the share that a step trains on."""
    shares = loss_uses(cls, "steps_per_generation")
    if shares is None:
        raise CureError(
            "TokenNormalizerMixin",
            expected="whether the loss divides by the share of tokens that a step trains on",
            seen="a loss function around TRL's uses steps_per_generation, and TRL's does not",
            packages=("trl",),
        )
    return shares


def _masks_before_it_counts(cls: type) -> bool:
    """Whether TRL leaves truncated completions out before it counts tokens, as from 1.9 on."""
    for _, defined, _ in definitions(cls, "_generate_and_score_completions"):
        for code in codes_of(defined):
            # As texts, since one instruction of Python 3.13 may store two names.
            mentions = [str(instruction.argval) for instruction in dis.get_instructions(code)]
            first = [
                next((at for at, mention in enumerate(mentions) if name in mention), None)
                for name in ("mask_truncated_completions", "num_items_in_batch")
            ]
            if first[0] is not None and first[1] is not None:
                return first[0] < first[1]
    return False
