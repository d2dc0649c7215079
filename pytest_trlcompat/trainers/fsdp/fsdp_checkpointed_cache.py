"""Cure of ``fsdp-checkpointed-cache``: FSDP's own activation checkpointing of a model that fills a key-value cache.

A model of Transformers keeps keys and values in a forward pass, unless it is told not to or checkpoints itself. Where
FSDP's wrapper checkpoints its layers, the model does not know, and each layer, computed again for the backward pass,
finds in the cache what it put there before: ``The size of tensor a (40) must match the size of tensor b (20)``. The
cure tells it, in forward passes for training alone.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from pytest_trlcompat.trainers.curing.conditions import Condition, fsdp_version, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure

__all__ = ["FSDPCheckpointedCacheMixin"]


class FSDPCheckpointedCacheMixin(Cure):
    """Lets a subclass of ``transformers.Trainer`` train with ``activation_checkpointing`` of FSDP.

    Does nothing where a call says itself whether to use the cache, as newer TRL's do, for calls without gradients, such
    as generation, and for models without a cache.
    """

    _kinds: ClassVar = {
        "trainer": ("DDPAdapterCheckpointingMixin", "neither calls the other; it was measured here"),
        "grpo": ("DDPAdapterCheckpointingMixin", "neither calls the other; it was measured here"),
    }
    accelerator: Any
    model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if FSDPCheckpointedCacheMixin._activity(type(self), self).active:
            self.model.register_forward_pre_hook(_without_cache, with_kwargs=True)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        return under(trainer, "the model would fill its cache again", _WRAPPED, _HAS_CACHE)


def _without_cache(model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if "use_cache" in kwargs or not torch.is_grad_enabled():  # TRL says so itself from 0.22 on
        return None
    return args, {**kwargs, "use_cache": False}


def _has_cache(config: Any) -> bool:
    # With images, `use_cache` may be in the configuration of the language model alone.
    language = config.get_text_config() if hasattr(config, "get_text_config") else config
    return any(hasattr(part, "use_cache") for part in (config, language))


_WRAPPED = Condition(
    "with activation_checkpointing of FSDP",
    "FSDP checkpoints no activations",
    lambda trainer: (
        fsdp_version(trainer.accelerator) is not None
        and bool(trainer.accelerator.state.fsdp_plugin.activation_checkpointing)
    ),
)
_HAS_CACHE = Condition(
    "with a model that has a cache",
    "the model has no cache",
    lambda trainer: _has_cache(getattr(trainer.model, "config", None)),
)
