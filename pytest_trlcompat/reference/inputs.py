"""Inputs of a model other than tokens, such as images, of several rows together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["TOKEN_INPUTS", "joined_inputs", "tensors_of"]

TOKEN_INPUTS = ("mm_token_type_ids", "token_type_ids")
"""Inputs that have a number for each token; 0 is that of text, as completions are."""


def joined_inputs(rows: Sequence[Mapping[str, Tensor]], starts: Sequence[int], width: int) -> dict[str, Tensor]:
    """The inputs of a batch, from those of each row alone.

    Images follow each other in the order of rows, whatever number of them a row has: "pixel_values: the tensors
    corresponding to the input images", a model finds where they belong by its image tokens (Transformers'
    documentation of LLaVA and of Qwen2-VL).

    Args:
        rows: of each row the inputs by name; none for a row of text.
        starts: at which token of the batch each prompt begins, that is behind its padding.
        width: tokens of the batch.

    Returns:
        By name ``(rows, width)`` of :data:`TOKEN_INPUTS`, of others what belongs to all images of all rows.
    """
    joined: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        present = [row[name] for row in rows if name in row]
        if name not in TOKEN_INPUTS:
            joined[name] = torch.cat(present)
            continue
        joined[name] = torch.zeros(len(rows), width, dtype=present[0].dtype)
        for row, (row_inputs, start) in enumerate(zip(rows, starts, strict=True)):
            if name in row_inputs:
                joined[name][row, start : start + row_inputs[name].shape[1]] = row_inputs[name][0]
    return joined


def tensors_of(inputs: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """Inputs of a row that are nested lists, as tensors."""
    return {name: torch.tensor(value) for name, value in (inputs or {}).items()}
