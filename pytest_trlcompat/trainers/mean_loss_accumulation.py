"""Cure of ``trainer-accumulation`` where Transformers divides a loss twice by the number of micro-batches.

``Trainer`` divides a loss that is a mean of its micro-batch by how many there are in a step: that of DPO, KTO, RLOO, a
reward model or a trainer of your own, whose batches have no number of items, or which says by
``model_accepts_loss_kwargs`` that its loss does not take it. In some releases DeepSpeed divides once more, in others
Accelerate does, which ``Trainer`` gives that number: gradients are N times too short, without an error. The cure
multiplies the loss by what is missing, and leaves alone a loss that ``Trainer`` does not divide.

Imports Transformers, and of this package ``gradient_accumulation`` and ``_conditions``.
"""

from __future__ import annotations

from typing import Any

import transformers
from packaging.version import Version

from pytest_trlcompat.trainers._conditions import ACCUMULATION
from pytest_trlcompat.trainers._cure import Activity
from pytest_trlcompat.trainers.gradient_accumulation import ScaledBackward

__all__ = ["MeanLossAccumulationMixin"]

_BY_DEEPSPEED = (Version("4.48.0"), Version("4.49.0"))
_BY_ACCELERATE = (Version("5.2.0"), Version("5.5.4"))
"""The first release that divides twice, and the first that does not any more."""


class MeanLossAccumulationMixin(ScaledBackward):
    """Scales the gradients of a subclass of ``transformers.Trainer`` whose loss ``Trainer`` divides.

    Does nothing where ``gradient_accumulation_steps`` is 1, and with releases of Transformers that divide once.
    """

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        items = args[2] if len(args) > 2 else kwargs.get("num_items_in_batch")
        if _divides_twice(self._by_deepspeed()) and self._is_divided(items):
            return super().training_step(*args, **kwargs)
        upstream: Any = super(ScaledBackward, self)
        return upstream.training_step(*args, **kwargs)

    def _is_divided(self, items: Any) -> bool:
        """As ``Trainer`` decides whether it divides a loss.

        Args:
            items: the number of items in the step, where it is known.
        """
        takes_items = getattr(self, "model_accepts_loss_kwargs", False) and items is not None
        return not takes_items and getattr(self, "compute_loss_func", None) is None

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        both = (False, True) if trainer is None else (trainer._by_deepspeed(),)
        if not any(map(_divides_twice, both)):
            return Activity(False, "Transformers, with what it divides gradients by, divides a loss once")
        if trainer is None:
            where = "with DeepSpeed" if _divides_twice(True) else "without DeepSpeed"
            return Activity(None, f"{ACCUMULATION.where}, {where}: a loss that Trainer divides is divided twice")
        return super()._activity(trainer_class, trainer)


def _divides_twice(by_deepspeed: bool) -> bool:
    first, cured = _BY_DEEPSPEED if by_deepspeed else _BY_ACCELERATE
    return first <= Version(transformers.__version__) < cured
