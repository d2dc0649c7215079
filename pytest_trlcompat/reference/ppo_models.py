"""What a value model says about states, and a reward model about responses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_trlcompat.reference._together import output_of_rows, widened
from pytest_trlcompat.reference.tokens import Tokens

__all__ = ["response_scores", "state_values"]


def state_values(model: Any, tokens: Tokens, steps: Tensor, *, padded: bool = False) -> Tensor:
    """The value of the state that each step acts in, that is the query and the tokens before it: ``(R, C)``.

    Each row goes through the model without padding in front of it, as in
    :func:`~pytest_trlcompat.reference.score_tokens`.

    Args:
        model: called with ``input_ids`` and ``attention_mask``, both ``(rows, tokens)``; returns a number for each
            token, ``(rows, tokens)`` or ``(rows, tokens, 1)``, or an object that has them as ``logits``.
        steps: ``(R, C)``, steps that have a value; it is 0 elsewhere.
        padded: with queries padded in front, as a trainer does it.
    """
    if padded:
        ids = torch.cat([tokens.prompt_ids, tokens.completion_ids], 1)
        mask = torch.cat([tokens.prompt_mask, tokens.completion_mask], 1)
        # (R, P + C) to (R, C), from the query's last token on.
        values = _numbers(model, ids, mask)[:, tokens.prompt_ids.shape[1] - 1 : -1]
    else:
        width = tokens.completion_ids.shape[1]
        rows = tokens.rows()
        numbers = _numbers_of_rows(model, tokens)
        # The state before the first token of a response is the query: its value stands at the query's last token.
        starting = [
            row_values[len(prompt) - 1 :][:width] for (prompt, _), row_values in zip(rows, numbers, strict=True)
        ]
        values = torch.stack(
            [torch.nn.functional.pad(row_values, (0, width - len(row_values))) for row_values in starting]
        )
    return torch.where(steps, values, 0.0)


def response_scores(model: Any, tokens: Tokens) -> Tensor:
    """The reward model's number at the last token of each response: ``(R,)``.

    "The reward model only outputs the value at the last token", of "the truncated response" (Huang et al., reward
    model, detail 1, and policy training, detail 5).

    Args:
        model: as for :func:`state_values`; it is not trained.
    """
    with torch.no_grad():
        return torch.stack([numbers[-1] for numbers in _numbers_of_rows(model, tokens)])


def _numbers_of_rows(model: Any, tokens: Tokens) -> list[Tensor]:
    rows = [torch.cat(row) for row in tokens.rows()]
    return [_one_each(model, numbers, row) for numbers, row in zip(output_of_rows(model, rows), rows, strict=True)]


def _numbers(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    device = next(model.parameters()).device
    output = model(input_ids=ids.to(device), attention_mask=mask.to(device).long())
    return _one_each(model, widened(getattr(output, "logits", output).cpu()), ids)


def _one_each(model: Any, numbers: Tensor, ids: Tensor) -> Tensor:
    if numbers.dim() == ids.dim() + 1:
        numbers = numbers.squeeze(-1)
    if numbers.shape != ids.shape:
        raise ValueError(f"{type(model).__name__} gives {tuple(numbers.shape)} for {tuple(ids.shape)} tokens")
    return numbers
