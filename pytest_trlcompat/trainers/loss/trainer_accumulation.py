"""Cure of ``trainer-accumulation`` where a loss is divided twice by the number of accumulated micro-batches.

A loss that is a mean of its micro-batch, as that of DPO, KTO, RLOO, a reward model or a trainer of your own, is divided
by ``Trainer``; one that is a share of the step's, by its number of items, as that of SFT, is not to be divided any
more. In some releases DeepSpeed divides once more, in others Accelerate does, which ``Trainer`` gives that number:
gradients are N times too short, without an error. The cure multiplies the loss by what is missing.

A loss of your own that takes no number of items, where ``Trainer`` believes that it does, is not divided at all in
other releases, and rightly once in these: it is left alone.
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any, ClassVar

import transformers
from packaging.version import Version

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import ACCUMULATION
from pytest_trlcompat.trainers.curing.cure import Activity
from pytest_trlcompat.trainers.curing.upstream import definitions
from pytest_trlcompat.trainers.loss.gradient_accumulation import ScaledBackward

__all__ = ["TrainerAccumulationMixin"]

_BY_DEEPSPEED = (Version("4.48.0"), Version("4.49.0"))
_BY_ACCELERATE = (Version("5.2.0"), Version("5.5.4"))
"""The first release that divides twice, and the first that does not any more."""


class TrainerAccumulationMixin(ScaledBackward):
    """Scales the gradients of a subclass of ``transformers.Trainer`` other than GRPO's.

    Does nothing where ``gradient_accumulation_steps`` is 1, and with releases of Transformers that divide once.
    """

    # GRPO's gradients have a cure of their own, GradientAccumulationMixin.
    _kinds: ClassVar = {
        "trainer": ("", "its training_step calls all others"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.TRAINING_STEP,)
    _is_share: bool = False

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        items = args[2] if len(args) > 2 else kwargs.get("num_items_in_batch")
        self._is_share = self._takes(items)
        if _divides_twice(self._by_deepspeed()) and (not self._is_share or self._goes_on_upstream):
            return super().training_step(*args, **kwargs)
        upstream: Any = super(ScaledBackward, self)
        return upstream.training_step(*args, **kwargs)

    def _takes(self, items: Any) -> bool:
        """Whether ``Trainer`` leaves the loss undivided, as one that was made with the number of items in the step."""
        accepts = getattr(self, "model_accepts_loss_kwargs", False) or getattr(self, "compute_loss_func", None)
        return bool(accepts) and items is not None

    @cached_property
    def _goes_on_upstream(self) -> bool:
        """Whether the loss is that of TRL's or Transformers' trainer, also where a subclass goes on to it."""
        return any(package in ("trl", "transformers") for package, _, _ in definitions(type(self), "compute_loss"))

    def _loss_is_divided(self) -> bool:
        return self._is_share or super()._loss_is_divided()

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        both = (False, True) if trainer is None else (trainer._by_deepspeed(),)
        if not any(map(_divides_twice, both)):
            return Activity(False, "Transformers, with what it divides gradients by, divides a loss once")
        if trainer is None:
            where = "with DeepSpeed" if _divides_twice(True) else "without DeepSpeed"
            return Activity(None, f"{ACCUMULATION.where}, {where}: a loss is divided twice")
        return super()._activity(trainer_class, trainer)


def _divides_twice(by_deepspeed: bool) -> bool:
    return _is_between(transformers.__version__, *(_BY_DEEPSPEED if by_deepspeed else _BY_ACCELERATE))


@cache  # asked at each step
def _is_between(version: str, first: Version, cured: Version) -> bool:
    return first <= Version(version) < cured
