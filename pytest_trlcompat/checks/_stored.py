"""What Transformers makes of a live tensor when it saves a model: other names, and other cuts.

Transformers 5 keeps the experts of a mixture in one tensor and saves them one by one, as the published checkpoints have
them; 4.52 to 4.57 save some models under older names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Stored"]


class Stored:
    """How Transformers stores the tensors of ``model``, told by its own conversion.

    Args:
        model: a model without wrappers. A module that is not a Transformers model is not converted.
    """

    def __init__(self, model: Any, saved: Collection[str]) -> None:
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._convert = _conversion(self._model)
        self._old_names = _old_names(self._model, saved)

    @property
    def converts(self) -> bool:
        """Whether Transformers stores this model's tensors under other names, or cut in another way, than it trains."""
        return self._convert is not None

    def names(self, name: str) -> list[str]:
        """Names under which a live tensor may be stored as it is."""
        old = self._old_names.get(name)
        return [name] if old is None else [old, name]

    def of(self, live: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """What the live tensors are stored as, by name; ``None`` if these alone do not determine it."""
        if self._convert is None:
            return None
        try:
            with torch.no_grad():
                stored: dict[str, Tensor] = self._convert(self._model, dict(live))
        except Exception:  # it may need tensors that are not among these, and raises what it likes then
            return None
        count = sum(tensor.numel() for tensor in live.values())
        return stored if sum(tensor.numel() for tensor in stored.values()) == count else None


def _conversion(model: Any) -> Any:
    """Transformers' own function, where it has one and this model is converted."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # Transformers 4
        return None
    if not hasattr(model, "config"):
        return None
    try:
        converted = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False)
    except Exception:  # the model is none of Transformers'
        return None
    return revert_weight_conversion if converted else None


def _old_names(model: Any, saved: Collection[str]) -> dict[str, str]:
    """Names in a folder, by those that ``from_pretrained`` of Transformers 4.52 to 4.57 gives the same tensors."""
    mapping: Mapping[str, str] = getattr(model, "_checkpoint_conversion_mapping", None) or {}
    old_names = {}
    for name in saved:
        for pattern, replacement in mapping.items():
            renamed, times = re.subn(pattern, replacement, name)
            if times:
                old_names[renamed] = name
                break
    return old_names
