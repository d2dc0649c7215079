"""Cure of ``grpo-gradient-accumulation``: one step's gradient, once divided.

With gradient accumulation over N micro-batches each loss must be divided by N, once. Depending on the release of
Transformers nobody does for a trainer that computes its own loss, as GRPO does, and gradients are N times too long,
while the reported loss is right; or ``Trainer`` does, and DeepSpeed does so again; or ``Trainer`` gives Accelerate the
number N, which then divides as well, unless DeepSpeed does the backward pass: N times too short. ``Trainer`` may
moreover enter ``no_sync`` between micro-batches, which DeepSpeed refuses under ZeRO-2 and ZeRO-3: ``no_sync context
manager is incompatible with gradient partitioning``. The cure multiplies the loss by what is missing.

Imports Accelerate and Transformers, and of this package ``deepspeed_accumulation``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

import transformers
from accelerate.utils import DistributedType
from packaging.version import Version

from pytest_trlcompat.trainers.deepspeed_accumulation import synchronising

__all__ = ["GradientAccumulationMixin"]


class GradientAccumulationMixin:
    """Scales the gradients of a subclass of ``transformers.Trainer`` that computes its own loss as the mean of a batch.

    Does nothing where ``gradient_accumulation_steps`` is 1. It knows by the code of ``Trainer.training_step``, by the
    steps that Accelerate counts, and by the version of Transformers whether the division there comes before the
    backward pass. What is reported stays as it is.
    """

    accelerator: Any
    args: Any
    _loss_factor: float = 1.0

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
        factor = self._missing_factor()
        if factor == 1.0:
            return upstream.training_step(*args, **kwargs)
        self._loss_factor = factor
        try:
            return upstream.training_step(*args, **kwargs) / factor
        finally:
            self._loss_factor = 1.0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        loss = upstream.compute_loss(*args, **kwargs)
        return loss if self._loss_factor == 1.0 else loss * self._loss_factor

    def _missing_factor(self) -> float:
        """What to multiply the loss by before its backward pass, so that it is divided by N once."""
        if _tells_deepspeed_not_to_divide(transformers.Trainer.training_step):
            return 1.0
        by_trainer = Version(transformers.__version__) >= Version("4.48.0")
        steps: int = self.args.gradient_accumulation_steps
        return float(steps) ** (by_trainer + self._by_deepspeed() - 1)

    def _by_deepspeed(self) -> bool:
        return bool(self.accelerator.distributed_type == DistributedType.DEEPSPEED)


def _tells_deepspeed_not_to_divide(training_step: Callable[..., Any]) -> bool:
    """Whether it passes ``scale_wrt_gas``, as Trainer does from 4.49.0 on, where it has divided the loss itself."""
    return _holds(inspect.unwrap(training_step).__code__, "scale_wrt_gas")


def _holds(code: CodeType, constant: str) -> bool:
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return constant in code.co_consts or any(_holds(one, constant) for one in inner)
