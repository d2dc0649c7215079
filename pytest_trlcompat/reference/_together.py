"""Rows of unequal lengths in one call of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["output_of_rows", "widened"]


def output_of_rows(model: Any, rows: Sequence[Tensor]) -> list[Tensor]:
    """What a causal model gives for each row: ``(tokens, ...)``, of a 16-bit model in 32 bits, on the CPU.

    In a causal model, later tokens do not change the output at a token. So rows go through the model together, each
    padded at its end, and every number is that of the row alone. Neither position ids nor the mask matter.

    Args:
        model: called with ``input_ids`` and ``attention_mask``, both ``(rows, tokens)``; returns a tensor with these
            dimensions first, or an object that has it as ``logits``.
        rows: token ids, ``(tokens,)`` each.

    Raises:
        ValueError: if it gives something else.
    """
    device = next(model.parameters()).device
    ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    output = model(input_ids=ids.to(device), attention_mask=mask.to(device).long())
    logits = widened(getattr(output, "logits", output).cpu())
    if logits.shape[:2] != ids.shape:
        raise ValueError(f"{type(model).__name__} gives {tuple(logits.shape)} for {tuple(ids.shape)} tokens")
    return [row_logits[: len(row)] for row_logits, row in zip(logits, rows, strict=True)]


def widened(values: Tensor) -> Tensor:
    """The softmax of a 16-bit model is taken in 32 bits, as PyTorch's autocast does."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()
