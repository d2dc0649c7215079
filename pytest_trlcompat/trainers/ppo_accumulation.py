"""Cure of ``ppo-gradient-accumulation``: PPO accumulates gradients under DeepSpeed.

TRL's PPO trainer accumulates within ``Accelerator.accumulate``, which enters the model's ``no_sync`` for all
micro-batches but the last. From DeepSpeed 0.16.0 on that is refused where gradients are partitioned, ``no_sync context
manager is incompatible with gradient partitioning``, which Accelerate heeds from 1.9.0 on. Under ZeRO-1 it is entered
still, and within it DeepSpeed before 0.18.3 does not divide: all micro-batches but the last count N times. DeepSpeed
needs no ``no_sync``, since it is told which micro-batch is the last, or counts them.

Beside that comes what DeepSpeed 0.17.6 to 0.19.5 do to every trainer: see :mod:`.deepspeed_accumulation`.
"""

from __future__ import annotations

from typing import Any

from pytest_trlcompat.trainers.deepspeed_accumulation import repair_accumulation, synchronising

__all__ = ["PPOAccumulationMixin"]


class PPOAccumulationMixin:
    """Lets a subclass of TRL's PPO trainer accumulate gradients under DeepSpeed; does nothing without it.

    Needless with Accelerate from 1.9.0 and DeepSpeed from 0.19.6 on, or where ``gradient_accumulation_steps`` is 1: the
    numbers are upstream's there.
    """

    accelerator: Any

    def train(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        wrapped = getattr(self.accelerator, "deepspeed_engine_wrapped", None)
        if wrapped is not None:
            self.accelerator.no_sync = synchronising
            repair_accumulation(wrapped.engine)
        return upstream.train(*args, **kwargs)
