"""How evenly a mixture of experts is used: its auxiliary loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_trlcompat.reference.tokens import Tokens

__all__ = ["load_balancing_loss", "router_logits"]


def router_logits(model: Any, tokens: Tokens) -> Tensor:
    """What the routers of all layers say about every token of prompts and completions: ``(layers x tokens, experts)``.

    Each row goes through the model alone and without padding, as in
    :func:`~pytest_trlcompat.reference.score_tokens`.

    Args:
        model: called with ``input_ids``, ``attention_mask`` and ``output_router_logits=True``; returns an object that
            has ``router_logits``, of each layer ``(tokens, experts)``.
    """
    device = next(model.parameters()).device
    logits = []
    for row, length in enumerate(tokens.lengths.tolist()):
        prompt = tokens.prompt_ids[row][tokens.prompt_mask[row]]
        ids = torch.cat([prompt, tokens.completion_ids[row, :length]])[None].to(device)
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), output_router_logits=True)
        logits += [layer_logits.cpu() for layer_logits in output.router_logits]
    return torch.cat(logits)


def load_balancing_loss(logits: Tensor, experts_per_token: int) -> Tensor:
    """``N * sum_i f_i * P_i`` over the ``N`` experts: a scalar, ``experts_per_token`` where all are used alike.

    ``f_i`` is the part of the tokens that are routed to expert ``i``, which has no gradient; ``P_i`` the mean of the
    probabilities that routers give it. Source: Fedus, Zoph and Shazeer, "Switch Transformers", equations 4 to 6,
    https://arxiv.org/abs/2101.03961, where a token has one expert. Undecided by the documentation: tokens of all layers
    count together, as in the documentation of Transformers' models, and not layer by layer.

    Args:
        logits: ``(tokens, experts)``.
    """
    probabilities = torch.softmax(logits.float(), -1)
    # (tokens, experts): 1 for each expert that a token goes to.
    chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(experts_per_token, -1).indices, 1.0)
    return logits.shape[1] * (chosen.mean(0) * probabilities.mean(0)).sum()
