"""Cure of ``ppo-max-grad-norm`` and ``first-rloo-max-grad-norm``: PPO, and the first RLOO, clip gradients.

TRL's PPO trainer has a training loop of its own, as has its first RLOO trainer, which steps without clipping, so that
``max_grad_norm`` of its arguments does nothing. The cure clips before each step of the optimizer that ends an
accumulation, as ``Trainer`` does.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar
from unittest import mock

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import DEEPSPEED, Condition, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure

__all__ = ["PPOGradNormMixin"]

_NOT_DEEPSPEED = Condition(
    "without DeepSpeed",
    "DeepSpeed clips, by its own configuration",
    lambda trainer: not DEEPSPEED.holds(trainer),
)
_LIMITED = Condition(
    "where max_grad_norm is set", "max_grad_norm is 0", lambda trainer: bool(trainer.args.max_grad_norm)
)


class PPOGradNormMixin(Cure):
    """Lets a subclass of TRL's PPO trainer, or of its first RLOO trainer, clip gradients by ``max_grad_norm``.

    As for ``Trainer``, it has a default, and 0 is no limit. Under DeepSpeed nothing is changed: its engine clips by its
    own configuration.
    """

    _kinds: ClassVar = {
        "ppo": ("PPOAccumulationMixin", "its train calls this one's"),
        "first_rloo": ("PPOOptimizerStepsMixin", "its train calls this one's"),
    }
    _points: ClassVar[patch_points.Points] = patch_points.ppo_methods("train")
    _needed: ClassVar = (_NOT_DEEPSPEED, _LIMITED)
    accelerator: Any
    args: Any
    model: Any
    optimizer: Any

    def train(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        # Asked by the name of this class: self has the conditions of the first mixin among its bases.
        clips = all(condition.holds(self) for condition in PPOGradNormMixin._needed)
        with self._clipping() if clips else nullcontext():
            return upstream.train(*args, **kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        return under(trainer, "TRL's loop steps without clipping", *cls._needed)

    def _clipping(self) -> AbstractContextManager[Any]:
        step = self.optimizer.step

        def clipped_step(*args: Any, **kwargs: Any) -> Any:
            if self.accelerator.sync_gradients:  # else Accelerate's optimizer does not step
                self.accelerator.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
            return step(*args, **kwargs)

        return mock.patch.object(self.optimizer, "step", clipped_step)
