"""Cure of ``lora-zero3-checkpointing``: adapters, ZeRO-3 and gradient checkpointing.

A layer that is computed again for its gradients ends with DeepSpeed's hooks, which partition its frozen parameters.
That leaves them empty under the eyes of PyTorch's non-reentrant checkpointing, which compares what it saved with what
it computed: ``CheckpointError: Recomputed values for the following tensors have different metadata``. Reentrant
checkpointing, which was the default once, does not compare: the cure asks for it.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any, ClassVar

from pytest_trlcompat.trainers.adapters.adapter_checkpointing import checkpointing_keywords, input_gradients_are_on
from pytest_trlcompat.trainers.curing.conditions import ADAPTER, CHECKPOINTING, ZERO3, installed, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure

__all__ = ["ZeRO3LoraCheckpointingMixin"]

_LOGGER = logging.getLogger(__name__)


class ZeRO3LoraCheckpointingMixin(Cure):
    """Makes the checkpointing of a subclass of ``trl.GRPOTrainer`` reentrant where it trains adapters under ZeRO-3.

    Does nothing with a DeepSpeed that leaves such parameters whole, which it knows by what that has. Else it knows by
    the arguments: ``use_reentrant=True`` is left alone there, ``False`` changed with a warning, a default without.
    Reentrant checkpointing gives a layer gradients only if its input requires one, so from then on the output of the
    embeddings does.
    """

    _kinds: ClassVar = {
        "grpo": ("AdapterCheckpointingMixin", "neither calls the other; it was measured here"),
    }
    args: Any
    model: Any
    accelerator: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if ZeRO3LoraCheckpointingMixin._activity(type(self), self).active:
            self._checkpoint_reentrantly()

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if not installed("deepspeed"):
            return Activity(False, "DeepSpeed is not installed")
        if _frozen_parameters_stay_whole():
            return Activity(False, "DeepSpeed leaves frozen parameters whole until the backward pass ends")
        return under(trainer, "checkpointing has to be reentrant", ZERO3, CHECKPOINTING, ADAPTER)

    def _checkpoint_reentrantly(self) -> None:
        requested = self.args.gradient_checkpointing_kwargs or {}
        reentrant = {**requested, "use_reentrant": True}
        if requested == reentrant:
            return
        if requested.get("use_reentrant") is False:
            _LOGGER.warning(
                "gradient_checkpointing_kwargs has use_reentrant=False, with which adapters cannot be trained under "
                "ZeRO-3 (transformers issue 47254); it is True now"
            )
        # train() turns checkpointing on with them.
        self.args.gradient_checkpointing_kwargs = reentrant
        # TRL's constructor may have turned it on already.
        if checkpointing_keywords(self.model) not in (None, reentrant):
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=reentrant)
        if not input_gradients_are_on(self.model):
            self.model.enable_input_require_grads()


def _frozen_parameters_stay_whole() -> bool:
    """Whether DeepSpeed waits for the end of the backward pass (its PR 8148)."""
    coordinator = import_module("deepspeed.runtime.zero.partitioned_param_coordinator")
    return hasattr(coordinator, "update_recompute_parameters")
