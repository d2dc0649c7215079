"""Cure of ``grpo-gradient-accumulation``: one step's gradient, once divided.

With gradient accumulation over N micro-batches each loss must be divided by N, once. Depending on the release of
Transformers nobody does for a trainer that computes its own loss, as GRPO does, and gradients are N times too long,
while the reported loss is right; or ``Trainer`` does, and DeepSpeed does so again; or ``Trainer`` gives Accelerate the
number N, which then divides as well, unless DeepSpeed does the backward pass: N times too short. ``Trainer`` may
moreover enter ``no_sync`` between micro-batches, which DeepSpeed refuses under ZeRO-2 and ZeRO-3: ``no_sync context
manager is incompatible with gradient partitioning``. The cure multiplies the loss by what is missing.

Imports torch, Accelerate and Transformers, and of this package ``_cure``, ``_upstream``, ``deepspeed_accumulation`` and
``errors``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import transformers
from accelerate.utils import DistributedType
from packaging.version import Version

from pytest_trlcompat.trainers._conditions import ACCUMULATION
from pytest_trlcompat.trainers._cure import Activity, Cure
from pytest_trlcompat.trainers._upstream import class_uses
from pytest_trlcompat.trainers.deepspeed_accumulation import synchronising
from pytest_trlcompat.trainers.errors import CureError

__all__ = ["GradientAccumulationMixin"]


class GradientAccumulationMixin(Cure):
    """Scales the gradients of a subclass of ``transformers.Trainer`` that computes its own loss as the mean of a batch.

    Does nothing where ``gradient_accumulation_steps`` is 1. It knows by the call of ``accelerator.backward``: by its
    arguments, by how often the loss has been divided since ``compute_loss`` returned it, which autograd says, and by
    what Accelerate and DeepSpeed will divide it by. That is measured once for each number of micro-batches. What is
    reported stays as it is.
    """

    accelerator: Any
    args: Any
    _computed_loss: torch.Tensor | None = None

    def create_accelerator_and_postprocess(self) -> None:
        upstream: Any = super()
        upstream.create_accelerator_and_postprocess()
        # DeepSpeed counts micro-batches itself; Trainer leaves it alone from 4.47.0 on.
        if self._by_deepspeed() and Version(transformers.__version__) < Version("4.47.0"):
            self.accelerator.no_sync = synchronising
        if not self._by_deepspeed() and self.accelerator.gradient_accumulation_steps != 1:
            self.accelerator.gradient_accumulation_steps = 1  # Trainer counts micro-batches, and divides

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        if self.args.gradient_accumulation_steps == 1:
            return upstream.training_step(*args, **kwargs)
        with self._scaled_backward():
            return upstream.training_step(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        computed = upstream.compute_loss(*args, **kwargs)
        self._computed_loss = computed[0] if isinstance(computed, tuple) else computed
        return computed

    @contextmanager
    def _scaled_backward(self) -> Iterator[None]:
        """Multiply what the accelerator is given by what is missing, while it lasts."""
        upstream = self.accelerator.backward
        factors: dict[bool, float] = vars(self).setdefault("_accumulation_factors", {})

        def backward(loss: torch.Tensor, **kwargs: Any) -> Any:
            scaled = bool(kwargs.get("scale_wrt_gas", True))
            factor = factors[scaled] if scaled in factors else self._missing_factor(loss, scaled)
            if self._micro_batches() > 1:  # of one alone nobody can say whether it was divided by their number
                factors[scaled] = factor
            return upstream(loss if factor == 1.0 else loss * factor, **kwargs)

        self._computed_loss = None
        with mock.patch.object(self.accelerator, "backward", backward):  # of this trainer's accelerator alone
            try:
                yield
            finally:
                self._computed_loss = None

    def _micro_batches(self) -> int:
        """How many there are in this optimizer step; the last one of an epoch may have fewer."""
        return int(getattr(self, "current_gradient_accumulation_steps", self.args.gradient_accumulation_steps))

    def _missing_factor(self, loss: torch.Tensor, scaled: bool) -> float:
        """What to multiply the loss by before its backward pass, so that it is divided once.

        Args:
            scaled: whether DeepSpeed is asked to divide.
        """
        by_trainer = self._divided_by_trainer(loss)
        by_backend = self._divided_by_backend(scaled)
        if self._loss_is_divided():
            return by_trainer * by_backend
        if by_trainer > 1:
            return float(by_backend)
        return 1.0 if by_backend > 1 else 1 / self.args.gradient_accumulation_steps

    def _divided_by_backend(self, scaled: bool) -> int:
        """By what Accelerate or DeepSpeed divides the loss that it is given."""
        if not self._by_deepspeed():
            return int(self.accelerator.gradient_accumulation_steps)
        return int(self.accelerator.deepspeed_engine_wrapped.engine.gradient_accumulation_steps()) if scaled else 1

    def _divided_by_trainer(self, loss: torch.Tensor) -> int:
        """By what the loss has been divided since ``compute_loss`` returned it: the reciprocal of its derivative."""
        computed = self._computed_loss
        derivative = None
        if computed is not None and computed.requires_grad and loss.requires_grad:
            (derivative,) = torch.autograd.grad(loss, computed, retain_graph=True, allow_unused=True)
        if derivative is None:
            raise self._unseen("the loss that it was given was not made from what compute_loss returned")
        found = float(derivative.sum())
        for divisor in (1, self.args.gradient_accumulation_steps, self._micro_batches()):
            if abs(found * divisor - 1) < 1e-2:  # in 16 bits a third is not a third
                return int(divisor)
        raise self._unseen(f"before it the loss was multiplied by {found:.6g}")

    def _unseen(self, found: str) -> CureError:
        return CureError(
            "GradientAccumulationMixin",
            wanted="how often accelerator.backward divides the loss by the number of accumulated micro-batches",
            found=found,
            packages=("transformers", "accelerate"),
            remedy=self._way_out,
        )

    _way_out = (
        "Call compute_loss in your training_step, or train with gradient_accumulation_steps=1, or leave this cure out "
        "if you divide the loss yourself: cured(YourTrainer, without=['GradientAccumulationMixin'])"
    )

    def _loss_is_divided(self) -> bool:
        """Whether TRL divides in ``compute_loss`` itself, where the Trainer must not do so again."""
        return class_uses(type(self), "current_gradient_accumulation_steps", but=("transformers.",))

    def _by_deepspeed(self) -> bool:
        return bool(self.accelerator.distributed_type == DistributedType.DEEPSPEED)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if trainer is not None and not ACCUMULATION.holds(trainer):
            return Activity(False, ACCUMULATION.otherwise)
        if trainer is None or not (factors := vars(trainer).get("_accumulation_factors")):
            return Activity(None, "measured at the first backward pass, where gradients are accumulated")
        factor = next(iter(factors.values()))
        if factor == 1.0:
            return Activity(False, "the loss is divided once by the number of micro-batches")
        return Activity(True, f"the loss is multiplied by {factor:g}, so that it is divided once")
