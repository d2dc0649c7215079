"""Cure of ``reward-adapter-checkpointing``, ``sft-adapter-checkpointing`` and ``grpo-lora-checkpointing``: gradients
for adapters under reentrant checkpointing, in any trainer.

Reentrant gradient checkpointing gives a layer gradients only if its input requires one. Where the model beneath the
adapters is frozen, embeddings included, it does not: training ends in ``element 0 of tensors does not require grad and
does not have a grad_fn``, or, where a head learns as well, goes on without an error and leaves every adapter as it was.
The cure asks the embeddings' output to require gradients.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import ADAPTER, CHECKPOINTING, installed, trains_adapters
from pytest_trlcompat.trainers.curing.cure import Activity, Cure

__all__ = ["AdapterCheckpointingMixin", "checkpointing_keywords", "input_gradients_are_on", "is_reentrant"]


def input_gradients_are_on(model: Any) -> bool:
    """Whether ``enable_input_require_grads`` was called on ``model``: its embeddings carry the hook of Transformers."""
    # By the hook's name, make_inputs_require_grads: Transformers 4 keeps the handle also when the hook is removed.
    embeddings = model.get_input_embeddings()
    return any("require_grads" in getattr(hook, "__qualname__", "") for hook in embeddings._forward_hooks.values())


def checkpointing_keywords(model: Any) -> dict[str, Any] | None:
    """The keywords that the layers of ``model`` checkpoint with, or ``None`` where no layer does."""
    for module in model.modules():
        # A partial of torch.utils.checkpoint.checkpoint; Transformers binds gradient_checkpointing_kwargs to it.
        function = getattr(module, "_gradient_checkpointing_func", None)
        if function is not None and getattr(module, "gradient_checkpointing", False):
            return dict(getattr(function, "keywords", {}))
    return None


def is_reentrant(model: Any) -> bool:
    """Whether the layers of ``model`` checkpoint, and do so reentrantly, which is torch's default."""
    keywords = checkpointing_keywords(model)
    return keywords is not None and bool(keywords.get("use_reentrant", True))


class AdapterCheckpointingMixin(Cure):
    """Lets a subclass of ``transformers.Trainer`` train adapters with reentrant gradient checkpointing.

    It looks when the model is wrapped for training, which is after checkpointing was turned on: at the keywords that
    the layers have, and for the hook that ``enable_input_require_grads`` leaves on the embeddings. Where the hook is
    there already, or checkpointing is not reentrant, nothing is changed.
    """

    _kinds: ClassVar = {
        "trainer": ("ZeRO3MixedDtypesMixin", "neither calls the other; it was measured here"),
        "grpo": ("LoraCheckpointingMixin", "neither calls the other; cures of one topic stand together"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.WRAP_MODEL,)

    _asked_for_gradients = False

    def _wrap_model(self, model: Any, training: bool = True, *args: Any, **kwargs: Any) -> Any:
        if training and trains_adapters(model) and is_reentrant(model) and not input_gradients_are_on(model):
            model.enable_input_require_grads()
            self._asked_for_gradients = True
        upstream: Any = super()
        return upstream._wrap_model(model, training, *args, **kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if not installed("peft"):
            return Activity(False, "PEFT is not installed")
        if trainer is None:
            return Activity(None, f"{CHECKPOINTING.where}, {ADAPTER.where}: by what was asked of the model")
        for condition in (CHECKPOINTING, ADAPTER):
            if not condition.holds(trainer):
                return Activity(False, condition.otherwise)
        if trainer._asked_for_gradients:
            return Activity(True, "the output of the embeddings requires gradients, which nobody else had asked for")
        if input_gradients_are_on(trainer.model):
            return Activity(False, "the embeddings' output requires gradients")
        return Activity(None, "depends on how the layers checkpoint, which is seen when the model is wrapped")
