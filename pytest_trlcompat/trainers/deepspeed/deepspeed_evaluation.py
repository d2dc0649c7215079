"""Cure of ``deepspeed-evaluate-before-train``: training after an evaluation under ZeRO-3.

``evaluate()`` before ``train()`` makes an engine without an optimizer, for inference, and to do so takes optimizer and
scheduler out of the configuration. ``train()`` destroys that engine, goes on with it all the same, and ends in
``'NoneType' object has no attribute 'backward'``. So does a second ``train()`` of the same trainer. The cure makes the
trainer forget the engine first, and gives the configuration back what was taken out.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import DEEPSPEED, ZERO3, installed
from pytest_trlcompat.trainers.curing.cure import Activity, Cure

__all__ = ["DeepSpeedEvaluationMixin", "remove_deepspeed_hooks"]


def remove_deepspeed_hooks(model: Any) -> int:
    """Take from all modules of ``model`` the forward hooks that an engine has left behind; returns how many."""
    removed = 0
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            stale = [key for key, hook in hooks.items() if (hook.__module__ or "").startswith("deepspeed.")]
            for key in stale:
                del hooks[key]
            removed += len(stale)
    return removed


class DeepSpeedEvaluationMixin(Cure):
    """Lets a subclass of ``transformers.Trainer`` evaluate before it trains, and train again, under DeepSpeed.

    A second ``train()`` goes on from the weights of the first, with a new optimizer. Evaluation before training is for
    ZeRO-3 alone; with other stages Transformers refuses it, and says so. It knows by the engine that the trainer has
    when ``train()`` is called; with none it does nothing.
    """

    _kinds: ClassVar = {
        "trainer": ("DeepSpeedAccumulationMixin", "neither calls the other; cures of one topic stand together"),
        "grpo": ("DeepSpeedHooksMixin", "neither calls the other; cures of one topic stand together"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.trainer_method("evaluation_loop"), patch_points.TRAIN)
    _needed: ClassVar = (DEEPSPEED,)
    accelerator: Any
    deepspeed: Any
    is_deepspeed_enabled: bool
    model: Any
    model_wrapped: Any
    _deepspeed_configuration: dict[str, Any] | None = None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_deepspeed_enabled and self.deepspeed is None:
            # To make an engine for inference, Transformers takes optimizer and scheduler out (transformers pull 44889).
            self._deepspeed_configuration = copy.deepcopy(self._configuration().config)
        upstream: Any = super()
        return upstream.evaluation_loop(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if self._has_an_engine():
            self._forget_engine()
        upstream: Any = super()
        return upstream.train(*args, **kwargs)

    def _has_an_engine(self) -> bool:
        """Whether an evaluation or a training has made one before."""
        return self.is_deepspeed_enabled and self.deepspeed is not None

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if not installed("deepspeed"):
            return Activity(False, "DeepSpeed is not installed")
        if trainer is not None and not trainer.is_deepspeed_enabled:
            return Activity(False, "not under DeepSpeed")
        if trainer is not None and trainer._has_an_engine():
            return Activity(True, "the engine of an earlier evaluation or training is forgotten")
        return Activity(None, f"{ZERO3.where}, where an evaluation or a training comes before")

    def _forget_engine(self) -> None:
        """Leave the engine behind, as Transformers is about to, but wholly: the trainer is as it was without it."""
        self.accelerator.free_memory()
        self.deepspeed, self.model_wrapped = None, self.model
        remove_deepspeed_hooks(self.model)
        if self._deepspeed_configuration is not None:
            self._configuration().config = self._deepspeed_configuration
            self._deepspeed_configuration = None

    def _configuration(self) -> Any:
        return self.accelerator.state.deepspeed_plugin.hf_ds_config
