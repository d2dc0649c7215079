"""Cure of ``grpo-lora-checkpointing``: gradients for adapters under reentrant checkpointing.

Reentrant gradient checkpointing gives a layer gradients only if its input requires one. Where the model beneath the
adapters is frozen, embeddings included, it does not: training ends in ``element 0 of tensors does not require grad and
does not have a grad_fn``, or, where the output head learns as well, goes on without an error and leaves every adapter
as it was. The cure asks the embeddings' output to require gradients.

With ``use_reentrant=False`` the first of these errors is met where TRL, to generate, turns checkpointing off, and then
on again without the keywords that it was given, which makes it reentrant in every step. The cure gives them back.

Imports nothing of the stack, and of this package ``_upstream``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pytest_trlcompat.trainers import patch_points
from pytest_trlcompat.trainers._conditions import ADAPTER, CHECKPOINTING, installed, trains_adapters
from pytest_trlcompat.trainers._cure import Activity
from pytest_trlcompat.trainers._patching import original
from pytest_trlcompat.trainers._upstream import AroundGeneration, generation_uses, points_of

__all__ = ["LoraCheckpointingMixin", "checkpointing_keywords", "input_gradients_are_on", "trains_adapters"]


def input_gradients_are_on(model: Any) -> bool:
    """Whether ``enable_input_require_grads`` was called on ``model``: its embeddings carry the hook of Transformers."""
    embeddings = model.get_input_embeddings()
    return any("require_grads" in getattr(hook, "__qualname__", "") for hook in embeddings._forward_hooks.values())


def checkpointing_keywords(model: Any) -> dict[str, Any] | None:
    """The keywords that the layers of ``model`` checkpoint with, or ``None`` where no layer does."""
    for module in model.modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        if function is not None and getattr(module, "gradient_checkpointing", False):
            return dict(getattr(function, "keywords", {}))
    return None


class LoraCheckpointingMixin(AroundGeneration):
    """Lets a subclass of ``trl.GRPOTrainer`` train adapters with gradient checkpointing.

    It knows by the hook that ``enable_input_require_grads`` leaves on the embeddings, and by the keywords that the
    layers have after generation. Where the hook is there already or checkpointing is not reentrant, and where the
    keywords are as they were, nothing is changed.
    """

    args: Any
    model: Any
    _asked_for_gradients = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        both = CHECKPOINTING.holds(self) and ADAPTER.holds(self)
        if both and _is_reentrant(self.args) and not input_gradients_are_on(self.model):
            self.model.enable_input_require_grads()
            self._asked_for_gradients = True

    @contextmanager
    def _around_generation(self) -> Iterator[None]:
        keeping = self._unwrapping(_keeping_keywords, LoraCheckpointingMixin.__name__)
        with keeping, super()._around_generation():
            yield

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if not installed("peft"):
            return Activity(False, "PEFT is not installed")
        if trainer is None:
            return Activity(None, f"{CHECKPOINTING.where}, {ADAPTER.where}: by what TRL has asked of the model")
        for condition in (CHECKPOINTING, ADAPTER):
            if not condition.holds(trainer):
                return Activity(False, condition.otherwise)
        if trainer._asked_for_gradients:
            return Activity(True, "the output of the embeddings requires gradients, which TRL did not ask for")
        if not _is_reentrant(trainer.args) and _forgets_keywords(trainer_class):
            return Activity(True, "TRL turns checkpointing on again without its keywords")
        return Activity(False, "the embeddings' output requires gradients, or checkpointing is not reentrant")


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
        if before is not None and checkpointing_keywords(model) not in (None, before):
            unwrapped.gradient_checkpointing_enable(gradient_checkpointing_kwargs=before)

    return unwrap_model_for_generation


def _is_reentrant(args: Any) -> bool:
    # Transformers 4 checkpoints so by default.
    return bool((args.gradient_checkpointing_kwargs or {}).get("use_reentrant", True))
