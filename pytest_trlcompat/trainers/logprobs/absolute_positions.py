"""Cure of positions that count the padding in front of a prompt.

Issues: ``grpo-positions``, ``rloo-positions``, ``distillation-positions``.

These trainers pad prompts on the left, and call models with a mask of the padding but without positions. A model whose
positions are absolute, such as GPT-2, then counts the padding among them. Transformers' ``generate`` passes positions
that do not, so a completion is sampled by one distribution, and scored by another.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing.conditions import modules_held
from pytest_trlcompat.trainers.curing.cure import Activity, Cure

__all__ = ["AbsolutePositionsMixin"]

_HOOKED = "_trlcompat_counts_no_padding"


class AbsolutePositionsMixin(Cure):
    """Gives models with absolute positions those that count no padding, where the trainer gives them none.

    Models are those that the trainer holds, reference models and teachers too. What is changed is a call with a mask
    that begins with padding and neither with positions nor with a cache. Models with relative positions, or which count
    by the mask themselves, are left as they are.
    """

    _kinds: ClassVar = {
        "trainer": ("AssistantPrefixMixin", "neither calls the other; it was measured here"),
        "grpo": ("AssistantPrefixMixin", "neither calls the other; it was measured here"),
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for model in _models(self):
            if not getattr(model, _HOOKED, False):
                setattr(model, _HOOKED, True)
                model.register_forward_pre_hook(_without_padding, with_kwargs=True)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if trainer is None:
            return Activity(None, "depends on the model: prompts are padded in front, and positions may be absolute")
        for model in _models(trainer):
            return Activity(True, f"the positions of {type(model).__name__} are absolute")
        return Activity(False, "no model has absolute positions")


def _models(trainer: Any) -> Iterator[Any]:
    """Those whose positions are absolute: they take positions, and look them up in a table of their own."""
    from transformers import PreTrainedModel

    for module in modules_held(trainer):
        if isinstance(module, PreTrainedModel) and _takes_positions(module) and _has_table(module):
            yield module


def _takes_positions(model: Any) -> bool:
    return "position_ids" in inspect.signature(type(model).forward).parameters


def _has_table(model: Any) -> bool:
    from torch import nn

    length = getattr(model.config, "max_position_embeddings", None)
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    words = model.get_input_embeddings()
    # Subclasses, as OPT has one, work out positions from the mask themselves.
    return any(
        type(table) is nn.Embedding and table.num_embeddings == length and table is not words for table in tables
    )


def _without_padding(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    mask = kwargs.get("attention_mask")
    is_given = kwargs.get("position_ids") is not None or kwargs.get("past_key_values") is not None
    if is_given or mask is None or mask.dim() != 2 or bool(mask[:, 0].all()):
        return None
    # As `generate` counts them; those of the padding do not matter, since it is masked.
    return args, {**kwargs, "position_ids": (mask.long().cumsum(1) - 1).clamp(min=0)}
