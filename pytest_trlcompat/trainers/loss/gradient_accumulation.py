"""Cure of ``grpo-gradient-accumulation``, and of ``trainer-accumulation`` for GRPO: a gradient that is divided once.

With gradient accumulation over N micro-batches each loss must be divided by N, once. Depending on the release of
Transformers nobody does for a trainer that computes its own loss, as GRPO does, and gradients are N times too long,
while the reported loss is right; or ``Trainer`` does, and DeepSpeed does so again; or ``Trainer`` gives Accelerate the
number N, which then divides as well, unless DeepSpeed does the backward pass: N times too short. ``Trainer`` may
moreover enter ``no_sync`` between micro-batches, which DeepSpeed refuses under ZeRO-2 and ZeRO-3: ``no_sync context
manager is incompatible with gradient partitioning``. The cure multiplies the loss by what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar
from unittest import mock

import torch
import transformers
from accelerate.utils import DistributedType
from packaging.version import Version

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import ACCUMULATION
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.errors import CureError
from pytest_trlcompat.trainers.curing.upstream import loss_uses
from pytest_trlcompat.trainers.deepspeed.deepspeed_accumulation import synchronising

__all__ = ["DIVISOR", "GradientAccumulationMixin", "ScaledBackward"]

ACCELERATOR_MADE = patch_points.trainer_method("create_accelerator_and_postprocess")

DIVISOR = "current_gradient_accumulation_steps"
"""The attribute by which TRL divides, and Trainer."""


class ScaledBackward(Cure):
    """Gives ``accelerator.backward`` a loss that is divided once by the number of accumulated micro-batches.

    It knows by the call of ``accelerator.backward``: by its arguments, by how often the loss has been divided since
    ``training_step`` was given it, which autograd says, and by what Accelerate and DeepSpeed will divide it by. What
    the trainer's ``compute_loss`` itself multiplies the loss by stays, and so does what is reported.

    Raises:
        CureError: at the first backward pass, where it cannot be seen how often the loss is divided.
    """

    _points: ClassVar[patch_points.Points] = (patch_points.TRAINING_STEP, patch_points.trainer_method("compute_loss"))
    accelerator: Any
    args: Any
    _accumulation_factor: float | None = None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        if not ACCUMULATION.holds(self):
            return upstream.training_step(*args, **kwargs)
        with self._scaled_backward():
            return upstream.training_step(*args, **kwargs)

    @contextmanager
    def _scaled_backward(self) -> Iterator[None]:
        """Multiply what the accelerator is given by what is missing, while it lasts."""
        compute, backward = self.compute_loss, self.accelerator.backward  # type: ignore[attr-defined] # Trainer's
        losses: list[torch.Tensor] = []

        def recorded(*args: Any, **kwargs: Any) -> Any:
            computed = compute(*args, **kwargs)
            loss = computed[0] if isinstance(computed, tuple) else computed
            # Another tensor: where the loss is what DeepSpeed's or FSDP's forward pass returns, as with Liger, that one
            # has hooks that begin the backward pass.
            losses.append(loss.view_as(loss))
            return (losses[-1], *computed[1:]) if isinstance(computed, tuple) else losses[-1]

        def scaled(loss: torch.Tensor, **kwargs: Any) -> Any:
            factor = self._missing_factor(loss, losses, bool(kwargs.get("scale_wrt_gas", True)))
            return backward(loss if factor == 1.0 else loss * factor, **kwargs)

        with (
            mock.patch.object(self, "compute_loss", recorded),  # whatever class of the trainer's defines it
            mock.patch.object(self.accelerator, "backward", scaled),  # of this trainer's accelerator alone
        ):
            yield

    @cached_property
    def _divisions_seen(self) -> dict[int, tuple[int, bool]]:
        """By number of micro-batches: by what ``Trainer`` divides, and whether the loss is divided by itself."""
        return {}

    def _micro_batches(self) -> int:
        """How many there are in this optimizer step; the last one of an epoch may have fewer."""
        return int(getattr(self, "current_gradient_accumulation_steps", self.args.gradient_accumulation_steps))

    def _missing_factor(self, loss: torch.Tensor, losses: Sequence[torch.Tensor], scaled: bool) -> float:
        """What to multiply the loss by before its backward pass, so that it is divided once.

        Args:
            losses: what ``compute_loss`` has returned in this training step.
            scaled: whether DeepSpeed is asked to divide.
        """
        steps = self._micro_batches()
        if steps not in self._divisions_seen:
            self._divisions_seen[steps] = self._divided_by_trainer(loss, losses), self._loss_is_divided()
        by_trainer, divided = self._divisions_seen[steps]
        by_backend = self._divided_by_backend(scaled)  # asked anew: another trainer may change it
        if divided:
            factor = float(by_trainer * by_backend)
        elif by_trainer > 1:
            factor = float(by_backend)
        else:
            factor = by_backend / steps
        if steps > 1:  # of one alone nobody can say
            self._accumulation_factor = factor
        return factor

    def _divided_by_backend(self, scaled: bool) -> int:
        """By what Accelerate or DeepSpeed divides the loss that it is given."""
        if not self._by_deepspeed():
            return int(self.accelerator.gradient_accumulation_steps)
        return int(self.accelerator.deepspeed_engine_wrapped.engine.gradient_accumulation_steps()) if scaled else 1

    def _divided_by_trainer(self, loss: torch.Tensor, losses: Sequence[torch.Tensor]) -> int:
        """By what the loss was divided since ``compute_loss`` returned it: the reciprocal of its derivative."""
        derivative = None
        if losses and losses[-1].requires_grad and loss.requires_grad:
            # The graph is kept, since the backward pass itself is still to come.
            (derivative,) = torch.autograd.grad(loss, losses[-1], retain_graph=True, allow_unused=True)
        if derivative is None:
            raise self._unseen("the loss that it was given was not made from what compute_loss returned")
        factor = float(derivative.sum())
        for divisor in (1, self.args.gradient_accumulation_steps, self._micro_batches()):
            if abs(factor * divisor - 1) < 1e-2:  # in 16 bits a third is not a third
                return int(divisor)
        raise self._unseen(f"before it the loss was multiplied by {factor:.6g}")

    def _loss_is_divided(self) -> bool:
        """Whether ``compute_loss`` returns a part of the step's mean, as TRL's does in newer releases."""
        divided = loss_uses(type(self), DIVISOR)
        if divided is None:
            raise self._unseen(f"a loss function around TRL's uses {DIVISOR}, by which TRL's does not divide")
        return divided

    def _unseen(self, seen: str) -> CureError:
        name = next(base.__name__ for base in type(self).__mro__ if ScaledBackward in base.__bases__)
        return CureError(
            name,
            expected="how often accelerator.backward divides the loss by the number of accumulated micro-batches",
            seen=seen,
            packages=("transformers", "accelerate"),
            remedy="Scale the loss in compute_loss and not in training_step, or train with "
            "gradient_accumulation_steps=1, or leave this cure out if you divide the loss yourself: "
            f"cured(YourTrainer, without=['{name}'])",
        )

    def _by_deepspeed(self) -> bool:
        return bool(self.accelerator.distributed_type == DistributedType.DEEPSPEED)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if trainer is not None and not ACCUMULATION.holds(trainer):
            return Activity(False, ACCUMULATION.otherwise)
        factor = None if trainer is None else trainer._accumulation_factor
        if factor is None:
            return Activity(None, "measured at the first backward pass, where gradients are accumulated")
        if factor == 1.0:
            return Activity(False, "the loss is divided once by the number of micro-batches")
        return Activity(True, f"the loss is multiplied by {factor:g}, so that it is divided once")


class GradientAccumulationMixin(ScaledBackward):
    """Scales the gradients of a subclass of ``transformers.Trainer`` that computes its own loss as the mean of a batch.

    Does nothing where ``gradient_accumulation_steps`` is 1.
    """

    _kinds: ClassVar = {
        "grpo": ("", "its training_step calls all others"),
    }
    _points: ClassVar[patch_points.Points] = (ACCELERATOR_MADE,)

    def create_accelerator_and_postprocess(self) -> None:
        upstream: Any = super()
        upstream.create_accelerator_and_postprocess()
        # DeepSpeed counts micro-batches itself; Trainer leaves it alone from 4.47.0 on.
        if self._by_deepspeed() and Version(transformers.__version__) < Version("4.47.0"):
            self.accelerator.no_sync = synchronising
