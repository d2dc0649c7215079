"""Cure of ``grpo-sampling``: completions sampled from the policy that is scored.

GRPO scores tokens by ``softmax(logits / temperature)``. Sampling may silently be narrower than that: TRL may leave the
50 most likely tokens to choose from, since ``GenerationConfig`` does, or pass a ``top_k=None`` that Transformers takes
for its default. And Transformers may put the preferences of the model's own ``generation_config.json`` in place of
whatever TRL sets to a default value, temperature 1 included. The cure says what is meant, and sets the preferences
aside while completions are sampled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

from torch import nn

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.cure import Activity
from pytest_trlcompat.trainers.curing.upstream import AroundGeneration, generation_uses

__all__ = ["SamplingMixin", "sampling_preferences_set_aside"]

_PREFERENCES = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "repetition_penalty",
)
"""What narrows or bends the distribution that tokens are sampled from."""


@contextmanager
def sampling_preferences_set_aside(model: nn.Module, generation_config: Any) -> Iterator[None]:
    """Let ``model`` sample as ``generation_config`` says, while the context lasts, whatever its own preferences.

    The model's ``generation_config`` itself stays as it is, and is what is saved. Does nothing where it has no
    preferences of its own.
    """
    # Not on the PeftModel, which forwards only reads: what is set on it would stay there.
    owner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    original = owner.generation_config
    preferences = {name: getattr(generation_config, name, None) for name in _PREFERENCES}
    if all(getattr(original, name, None) == value for name, value in preferences.items()):
        yield
        return
    owner.generation_config = copy.deepcopy(original)
    for name, value in preferences.items():
        setattr(owner.generation_config, name, value)
    try:
        yield
    finally:
        owner.generation_config = original


class SamplingMixin(AroundGeneration):
    """Lets a subclass of ``trl.GRPOTrainer`` sample as its arguments say, and from all tokens unless they limit them.

    Does nothing where TRL's ``unwrap_model_for_generation`` does the same: it looks for
    ``_override_model_generation_config`` there. It looks for ``top_k`` in the arguments, and takes ``None`` and its
    absence for no limit, as TRL's documentation does. With vLLM, which samples elsewhere, it does nothing either.
    """

    _kinds: ClassVar = {
        "grpo": ("LoggedMetricsMixin", "neither calls the other; it was measured here"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.GENERATION,)
    args: Any
    generation_config: Any
    _top_k_was: int | None = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if hasattr(self, "generation_config") and not self._limits_tokens():
            # None means no limit to Transformers 4, and the default of 50 to Transformers 5; 0 means no limit to both.
            self._top_k_was, self.generation_config.top_k = self.generation_config.top_k, 0

    def _limits_tokens(self) -> bool:
        more = getattr(self.args, "generation_kwargs", None) or {}
        return bool(getattr(self.args, "top_k", None) or more.get("top_k"))

    @contextmanager
    def _around_generation(self) -> Iterator[None]:
        with self._sampling(), super()._around_generation():
            yield

    def _sampling(self) -> AbstractContextManager[None]:
        if not hasattr(self, "generation_config") or _overridden_by_trl(type(self)):
            return nullcontext()
        return self._unwrapping(self._setting_aside, SamplingMixin.__name__)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if trainer is not None and not hasattr(trainer, "generation_config"):
            return Activity(False, "vLLM samples elsewhere")
        if trainer is not None and trainer._top_k_was != 0:
            return Activity(True, f"TRL samples with top_k={trainer._top_k_was}")
        if not _overridden_by_trl(trainer_class):
            return Activity(True, "TRL samples by the model's own preferences as well")
        if trainer is not None:
            return Activity(False, "TRL samples as its arguments say")
        return Activity(None, "where top_k is None: TRL sets the model's own preferences aside itself")

    def _setting_aside(self, unwrap: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def unwrap_model_for_generation(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with (
                unwrap(*args, **kwargs) as unwrapped,
                sampling_preferences_set_aside(unwrapped, self.generation_config),
            ):
                yield unwrapped

        return unwrap_model_for_generation


def _overridden_by_trl(trainer_class: type) -> bool:
    """Whether TRL itself has the model sample as the trainer says."""
    return generation_uses(trainer_class, "_override_model_generation_config")
