"""Cure of ``grpo-checkpointed-generation``: sampling with gradient checkpointing on, from a cache that is not filled.

GRPO generates with the model in training mode. A model that checkpoints its activations then drops or repeats what
generation keeps in its key-value cache: depending on the release of Transformers the whole sequence is read anew for
each token, on top of what the cache holds, or each token is computed from the one before it alone. Neither raises an
error: the completions are noise, and are trained on. The cure switches checkpointing off while completions are sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

from torch import nn

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import CHECKPOINTING, TRANSFORMERS_GENERATES, under
from pytest_trlcompat.trainers.curing.cure import Activity
from pytest_trlcompat.trainers.curing.upstream import AroundGeneration, generation_uses

__all__ = ["CheckpointedGenerationMixin", "gradient_checkpointing_off"]

_SWITCH = "gradient_checkpointing_disable"
"""What TRL's function calls where it switches checkpointing off itself."""


@contextmanager
def gradient_checkpointing_off(model: nn.Module) -> Iterator[None]:
    """Let no module of ``model`` checkpoint its activations while the context lasts; nothing else about it changes."""
    modules: list[Any] = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    # By this attribute alone, so that layers keep the keywords that they checkpoint with.
    for module in modules:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module in modules:
            module.gradient_checkpointing = True


class CheckpointedGenerationMixin(AroundGeneration):
    """Lets a subclass of ``trl.GRPOTrainer`` generate without gradient checkpointing, and train with it.

    Generation computes no gradients, so that nothing is lost by it. Does nothing where ``gradient_checkpointing`` is
    off, where TRL has switched it off for generation itself, and with vLLM, which generates elsewhere.
    """

    _kinds: ClassVar = {
        "grpo": ("SamplingMixin", "its _around_generation calls this one's"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.GENERATION,)
    args: Any

    @contextmanager
    def _around_generation(self) -> Iterator[None]:
        with self._generating(), super()._around_generation():
            yield

    def _generating(self) -> AbstractContextManager[None]:
        if not CHECKPOINTING.holds(self) or generation_uses(type(self), _SWITCH):
            return nullcontext()
        return self._unwrapping(_without_checkpointing, CheckpointedGenerationMixin.__name__)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if generation_uses(trainer_class, _SWITCH):
            return Activity(False, "TRL switches checkpointing off to generate")
        return under(trainer, "TRL generates with checkpointing on", CHECKPOINTING, TRANSFORMERS_GENERATES)


def _without_checkpointing(unwrap: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def unwrap_model_for_generation(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with unwrap(*args, **kwargs) as unwrapped, gradient_checkpointing_off(unwrapped):
            yield unwrapped

    return unwrap_model_for_generation
