"""Cure of ``deepspeed-empty-param-group`` and ``ppo-lr-scheduler-zip``: one learning rate per group of parameters.

Transformers puts parameters with and without weight decay into two groups. Where nothing is trained without decay, as
with most adapters, one is empty; DeepSpeed drops it, the scheduler still counts it, and a torch that zips strictly ends
the first step with ``zip() argument 2 is longer than argument 1``. The cure drops the empty group before the scheduler
counts.

Imports nothing of the stack.
"""

from __future__ import annotations

from typing import Any

from pytest_trlcompat.trainers._cure import Cure

__all__ = ["EmptyParamGroupsMixin"]


class EmptyParamGroupsMixin(Cure):
    """Drops empty groups from the optimizer of a subclass of ``transformers.Trainer``, before DeepSpeed does.

    Only under DeepSpeed: elsewhere an empty group does no harm, and a checkpoint's optimizer has it.
    """

    accelerator: Any
    optimizer: Any

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        created = upstream.create_optimizer(*args, **kwargs)
        groups = getattr(self.optimizer, "param_groups", None)
        # TRL's PPO trainers ask for their optimizer before they know is_deepspeed_enabled.
        uses_deepspeed = getattr(self.accelerator.state, "deepspeed_plugin", None) is not None
        if uses_deepspeed and groups is not None:
            groups[:] = [group for group in groups if group["params"]]
        return created
