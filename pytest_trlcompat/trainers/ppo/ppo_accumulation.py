"""Cure of ``ppo-gradient-accumulation``: PPO accumulates gradients under DeepSpeed.

TRL's PPO trainer accumulates within ``Accelerator.accumulate``, which enters the model's ``no_sync`` for all
micro-batches but the last. DeepSpeed refuses that where gradients are partitioned, ``no_sync context manager is
incompatible with gradient partitioning``, unless Accelerate heeds it. Under ZeRO-1 it is entered still, and within it
an older DeepSpeed does not divide: all micro-batches but the last count N times. DeepSpeed needs no ``no_sync``, since
it is called differently for the last micro-batch, or counts them: the cure leaves it out.

Beside that comes what DeepSpeed does to every trainer: see :mod:`.deepspeed_accumulation`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import ACCUMULATION, DEEPSPEED, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.deepspeed.deepspeed_accumulation import repair_accumulation, synchronising

__all__ = ["PPOAccumulationMixin"]


class PPOAccumulationMixin(Cure):
    """Lets a subclass of TRL's PPO trainer accumulate gradients under DeepSpeed; does nothing without it.

    Where upstream is right, or ``gradient_accumulation_steps`` is 1, the numbers are upstream's.
    """

    _kinds: ClassVar = {
        "ppo": ("PPOOptimizerStepsMixin", "its train calls this one's"),
    }
    _points: ClassVar[patch_points.Points] = patch_points.ppo_methods("train")
    _needed: ClassVar = (DEEPSPEED,)
    accelerator: Any

    def train(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        wrapped = getattr(self.accelerator, "deepspeed_engine_wrapped", None)
        if wrapped is not None:
            # Accelerate before 1.9 enters DeepSpeed's own for all micro-batches but the last.
            self.accelerator.no_sync = synchronising
            repair_accumulation(wrapped.engine)
        return upstream.train(*args, **kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        return under(trainer, "TRL accumulates within no_sync", DEEPSPEED, ACCUMULATION)
