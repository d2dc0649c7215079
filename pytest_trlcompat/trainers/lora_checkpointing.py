"""Cure of ``grpo-lora-checkpointing`` (trl 3150, 3089): gradients for adapters under reentrant checkpointing.

Reentrant gradient checkpointing gives a layer gradients only if its input requires one. Where the model beneath the
adapters is frozen, embeddings included, it does not: training ends in ``element 0 of tensors does not require grad and
does not have a grad_fn``, or, where the output head learns as well, goes on without an error and leaves every adapter
as it was. trl 0.14.0 to 0.15.2 do not ask the embeddings' output to require gradients, as later releases do.

Imports nothing of the stack.
"""

from __future__ import annotations

from typing import Any

__all__ = ["LoraCheckpointingMixin", "input_gradients_are_on", "trains_adapters"]


def trains_adapters(model: Any) -> bool:
    """Whether ``model`` is a ``PeftModel``."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def input_gradients_are_on(model: Any) -> bool:
    """Whether ``enable_input_require_grads`` was called on ``model``: its embeddings carry the hook of Transformers."""
    embeddings = model.get_input_embeddings()
    return any("require_grads" in getattr(hook, "__qualname__", "") for hook in embeddings._forward_hooks.values())


class LoraCheckpointingMixin:
    """Lets a subclass of ``trl.GRPOTrainer`` train adapters with gradient checkpointing (trl 3150, 3089).

    Needless from trl 0.16.0 on. It knows by the hook that ``enable_input_require_grads`` leaves on the embeddings;
    where it is there already, or checkpointing is not reentrant, nothing is changed.
    """

    args: Any
    model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if (
            self.args.gradient_checkpointing
            and trains_adapters(self.model)
            and _is_reentrant(self.args)
            and not input_gradients_are_on(self.model)
        ):
            self.model.enable_input_require_grads()


def _is_reentrant(args: Any) -> bool:
    # Transformers 4 checkpoints so unless told otherwise.
    return bool((args.gradient_checkpointing_kwargs or {}).get("use_reentrant", True))
