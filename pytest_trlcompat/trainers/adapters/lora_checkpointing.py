"""Cure of ``grpo-lora-checkpointing``: GRPO's adapters under gradient checkpointing.

What any trainer needs is in ``adapter_checkpointing``: under reentrant checkpointing the embeddings' output must
require gradients. With ``use_reentrant=False`` the same error is met where TRL, to generate, turns checkpointing off,
and then on again without the keywords that it was given, which makes it reentrant in every step. The cure gives them
back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from pytest_trlcompat.trainers.adapters.adapter_checkpointing import AdapterCheckpointingMixin, checkpointing_keywords
from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.cure import Activity
from pytest_trlcompat.trainers.curing.patching import original
from pytest_trlcompat.trainers.curing.upstream import AroundGeneration, generation_uses, points_of

__all__ = ["LoraCheckpointingMixin"]


class LoraCheckpointingMixin(AdapterCheckpointingMixin, AroundGeneration):
    """Lets a subclass of ``trl.GRPOTrainer`` train adapters with gradient checkpointing.

    In addition to what :class:`AdapterCheckpointingMixin` does, it gives the layers back the keywords that they had
    before a generation. Where the keywords are as they were, nothing is changed.
    """

    _kinds: ClassVar = {
        "grpo": ("TrainSamplerMixin", "neither calls the other; it was measured here"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.GENERATION, patch_points.WRAP_MODEL)
    args: Any

    @contextmanager
    def _around_generation(self) -> Iterator[None]:
        keeping = self._unwrapping(_keeping_keywords, LoraCheckpointingMixin.__name__)
        with keeping, super()._around_generation():
            yield

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        activity = super()._activity(trainer_class, trainer)
        if activity.active is not False and trainer is not None and _forgets_keywords(trainer_class):
            reentrant = (trainer.args.gradient_checkpointing_kwargs or {}).get("use_reentrant", True)
            if not reentrant:
                return Activity(True, "TRL turns checkpointing on again without its keywords")
        return activity


def _forgets_keywords(trainer_class: type) -> bool:
    """Whether TRL's function turns checkpointing on again, and is not given the keywords."""
    unwraps = [original(point) for point in points_of(trainer_class, patch_points.GENERATION)]
    if not unwraps or not generation_uses(trainer_class, "gradient_checkpointing_enable"):
        return False
    return any("gradient_checkpointing_kwargs" not in inspect.signature(unwrap).parameters for unwrap in unwraps)


def _keeping_keywords(unwrap: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def unwrap_model_for_generation(*args: Any, **kwargs: Any) -> Iterator[Any]:
        model = args[0] if args else kwargs["model"]
        before = checkpointing_keywords(model)
        with unwrap(*args, **kwargs) as unwrapped:
            yield unwrapped
        # TRL has turned checkpointing on again without keywords, so that it is reentrant.
        if before is not None and checkpointing_keywords(model) not in (None, before):
            unwrapped.gradient_checkpointing_enable(gradient_checkpointing_kwargs=before)

    return unwrap_model_for_generation
