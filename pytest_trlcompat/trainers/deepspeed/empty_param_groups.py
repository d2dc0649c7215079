"""Cure of ``deepspeed-empty-param-group`` and ``ppo-lr-scheduler-zip``: one learning rate per group of parameters.

Transformers puts parameters with and without weight decay into two groups. Where nothing is trained without decay, as
with most adapters, one is empty; DeepSpeed drops it, the scheduler still counts it, and a torch that zips strictly ends
the first step with ``zip() argument 2 is longer than argument 1``. The cure drops the empty group before the scheduler
counts.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import DEEPSPEED, installed
from pytest_trlcompat.trainers.curing.cure import Activity, Cure

__all__ = ["EmptyParamGroupsMixin"]

CREATE_OPTIMIZER = patch_points.trainer_method("create_optimizer")


class EmptyParamGroupsMixin(Cure):
    """Drops empty groups from the optimizer of a subclass of ``transformers.Trainer``, before DeepSpeed does.

    Only under DeepSpeed: elsewhere an empty group does no harm, and a checkpoint's optimizer has it.
    """

    _kinds: ClassVar = {
        "trainer": ("DeepSpeedEvaluationMixin", "neither calls the other; cures of one topic stand together"),
        "grpo": ("DeepSpeedEvaluationMixin", "neither calls the other; cures of one topic stand together"),
        "ppo": ("PPODeepSpeedHooksMixin", "neither calls the other; cures of one topic stand together"),
    }
    _points: ClassVar[patch_points.Points] = (CREATE_OPTIMIZER,)
    accelerator: Any
    optimizer: Any
    _dropped_groups: int | None = None

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        created = upstream.create_optimizer(*args, **kwargs)
        groups = getattr(self.optimizer, "param_groups", None)
        # TRL's PPO trainers ask for their optimizer before they know is_deepspeed_enabled.
        if DEEPSPEED.holds(self) and groups is not None:
            before = len(groups)
            groups[:] = [group for group in groups if group["params"]]
            # A sum, since some trainers ask for their optimizer twice.
            self._dropped_groups = (self._dropped_groups or 0) + before - len(groups)
        return created

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if not installed("deepspeed"):
            return Activity(False, "DeepSpeed is not installed")
        if trainer is None:
            return Activity(None, f"{DEEPSPEED.where}, where a group of parameters is empty")
        if not DEEPSPEED.holds(trainer):
            return Activity(False, DEEPSPEED.otherwise)
        if trainer._dropped_groups is None:
            return Activity(None, "seen when the optimizer is made")
        if not trainer._dropped_groups:
            return Activity(False, "no group of parameters is empty")
        return Activity(True, "an empty group of parameters was dropped")
