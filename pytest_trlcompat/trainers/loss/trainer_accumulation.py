"""Cure of ``trainer-accumulation``: a loss that is divided by the number of accumulated micro-batches once.

In TRL's own trainers the same is ``dpo-gradient-accumulation``, ``kto-gradient-accumulation``,
``orpo-gradient-accumulation`` and ``reward-gradient-accumulation``; GKD has it too.

A loss that is a mean of its micro-batch, as that of DPO, RLOO or a trainer of your own, is divided by ``Trainer``; one
that is a share of the step's, by its number of items, as that of SFT, is not to be divided any more. Two things go
wrong, without an error:

- In some releases DeepSpeed divides once more, in others Accelerate does, which ``Trainer`` gives that number:
  gradients are N times too short.
- ``Trainer`` takes a loss for a share of the step's where the model's ``forward`` takes keywords, in some releases in
  any case. TRL's trainers compute a mean all the same, and only later releases of theirs say so: nobody divides,
  gradients are N times too long, and so is the loss that is logged.

The cure multiplies the loss by what is missing, and divides what is logged.

A loss of your own that takes no number of items, where ``Trainer`` believes that it does, is not divided either, unless
you do it yourself, which cannot be seen: it is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any, ClassVar

import transformers
from packaging.version import Version

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import ACCUMULATION
from pytest_trlcompat.trainers.curing.cure import Activity
from pytest_trlcompat.trainers.curing.upstream import class_uses, definitions, loss_uses, path_uses, uses_parameter
from pytest_trlcompat.trainers.loss.gradient_accumulation import DIVISOR, ScaledBackward

__all__ = ["TrainerAccumulationMixin"]

_BY_DEEPSPEED = (Version("4.48.0"), Version("4.49.0"))
_BY_ACCELERATE = (Version("5.2.0"), Version("5.5.4"))
"""The first release that divides twice, and the first that does not any more."""
_DIVIDES = Version("4.48.0")
"""The first release whose ``Trainer`` divides a loss before its backward pass."""
_STEPS = "gradient_accumulation_steps"
_ITEMS = "num_items_in_batch"
_ACCEPTS = "model_accepts_loss_kwargs"
"""The attribute by which ``Trainer`` decides whether a loss was made with the number of items."""


class TrainerAccumulationMixin(ScaledBackward):
    """Scales the gradients of a subclass of ``transformers.Trainer`` other than GRPO's.

    Does nothing where ``gradient_accumulation_steps`` is 1, and where the loss is divided once.
    """

    # GRPO's gradients have a cure of their own, GradientAccumulationMixin.
    _kinds: ClassVar = {
        "trainer": ("", "its training_step calls all others"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.TRAINING_STEP,)
    _is_share: bool = False

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        items = args[2] if len(args) > 2 else kwargs.get(_ITEMS)
        is_undivided = self._may_stay_undivided
        self._is_share = self._takes(items) and not is_undivided
        if is_undivided or (_divides_twice(self._by_deepspeed()) and (not self._is_share or self._goes_on_upstream)):
            reported = super().training_step(*args, **kwargs)
            return self._divided_as_logged(reported) if is_undivided else reported
        # Past ScaledBackward, which would multiply the loss.
        upstream: Any = super(ScaledBackward, self)
        return upstream.training_step(*args, **kwargs)

    def _takes(self, items: Any) -> bool:
        """Whether ``Trainer`` leaves the loss undivided, as one that was made with the number of items in the step."""
        accepts = getattr(self, _ACCEPTS, False) or getattr(self, "compute_loss_func", None)
        return bool(accepts) and items is not None

    @cached_property
    def _may_stay_undivided(self) -> bool:
        """Whether the loss is a mean of its micro-batch, and ``Trainer`` may take it for one that is divided."""
        if _divides() and not getattr(self, _ACCEPTS, False):
            return False
        return getattr(self, "compute_loss_func", None) is None and _is_mean(type(self))

    @cached_property
    def _goes_on_upstream(self) -> bool:
        """Whether the loss is that of TRL's or Transformers' trainer, also where a subclass goes on to it."""
        return any(package in ("trl", "transformers") for package, _, _ in definitions(type(self), "compute_loss"))

    def _loss_is_divided(self) -> bool:
        return self._is_share or super()._loss_is_divided()

    def _divided_by_trainer(self, loss: Any, losses: Sequence[Any]) -> int:
        divisor = super()._divided_by_trainer(loss, losses)
        is_undivided = divisor == 1 and self._may_stay_undivided and self._micro_batches() > 1
        if is_undivided and path_uses(type(self), _STEPS, "compute_loss") is None:
            raise self._unseen(f"a loss function around TRL's uses {_STEPS}, by which TRL's does not divide")
        return divisor

    def _divided_as_logged(self, reported: Any) -> Any:
        """What is logged of a micro-batch, divided as the loss is."""
        steps = self._micro_batches()
        divisor, _ = self._divisions_seen.get(steps, (steps, False))
        # Before 4.48 Trainer divides what it logs, though not what it goes backward from.
        return reported if divisor > 1 or not _divides() else reported / steps

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if trainer is None and _says_nothing(trainer_class):
            return Activity(None, f"{ACCUMULATION.where}: Trainer may leave a mean undivided")
        if trainer is not None and trainer._may_stay_undivided:
            return super()._activity(trainer_class, trainer)
        both = (False, True) if trainer is None else (trainer._by_deepspeed(),)
        if not any(map(_divides_twice, both)):
            return Activity(False, "Transformers, with what it divides gradients by, divides a loss once")
        if trainer is None:
            where = "with DeepSpeed" if _divides_twice(True) else "without DeepSpeed"
            return Activity(None, f"{ACCUMULATION.where}, {where}: a loss is divided twice")
        return super()._activity(trainer_class, trainer)


def _is_mean(cls: type) -> bool:
    """Whether TRL computes the loss, without the number of items in the step, and Transformers' trainer goes backward.

    By the code that runs: a function of TRL's that names the number among its parameters and never reads it. What a
    user's function around it does is its own affair, as long as it goes on to TRL's.
    """
    steps = [package for package, _, _ in definitions(cls, "training_step")]
    losses = list(definitions(cls, "compute_loss"))
    if not steps or steps[-1] != "transformers" or not losses or losses[-1][0] != "trl":
        return False
    computed = [function for package, function, _ in losses if package == "trl"]
    return loss_uses(cls, DIVISOR) is False and not any(uses_parameter(function, _ITEMS) for function in computed)


def _says_nothing(cls: type) -> bool:
    """Whether a class computes a mean, and no code of TRL's tells ``Trainer`` so."""
    return _is_mean(cls) and (not _divides() or not class_uses(cls, _ACCEPTS, but=("transformers",)))


def _divides() -> bool:
    """Whether ``Trainer`` divides a loss before its backward pass, where it takes it for a mean."""
    return not _is_between(transformers.__version__, Version("0"), _DIVIDES)


def _divides_twice(by_deepspeed: bool) -> bool:
    return _is_between(transformers.__version__, *(_BY_DEEPSPEED if by_deepspeed else _BY_ACCELERATE))


@cache  # asked at each step
def _is_between(version: str, first: Version, cured: Version) -> bool:
    return first <= Version(version) < cured
