"""What a model says about completions: log-probabilities, entropies, and the divergence from a reference model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_trlcompat.reference._together import output_of_rows, widened
from pytest_trlcompat.reference.inputs import joined_inputs
from pytest_trlcompat.reference.tokens import Tokens

__all__ = ["Scores", "kl_estimate", "score_tokens"]


@dataclass(frozen=True)
class Scores:
    """What a model says about each token of a completion; 0 where ``completion_mask`` is false.

    Attributes:
        logprobs: ``(R, C)``, log-probability of the token, in nats.
        entropies: ``(R, C)``, entropy of the distribution that the token is drawn from, in nats.
    """

    logprobs: Tensor
    entropies: Tensor


def score_tokens(
    model: Any,
    tokens: Tokens,
    *,
    temperature: float = 1.0,
    entropy_at_temperature: bool = True,
    padded: bool = False,
) -> Scores:
    """Log-probability and entropy of each token of the completions.

    The policy is what completions are sampled from, that is ``softmax(logits / temperature)``; the same temperature
    holds for policy, old policy and reference model. Undecided by the documentation: ``temperature`` is called that
    "for sampling", and nothing is said of log-probabilities; a ratio of policies is one of sampling distributions.
    ``top_k``, ``top_p`` and the like, which change that distribution as well, are not applied.

    The prompt and the tokens before define a log-probability, whatever else is in the batch. Hence each row goes
    through the model without padding in front of it, so that neither position ids nor attention masks matter. A
    mixture of experts with a capacity, or dropout, would not allow that. Rows with ``inputs``, such as images, go
    through it one by one.

    Args:
        model: called with ``input_ids`` and ``attention_mask``, both ``(rows, tokens)``, and with the ``inputs`` of
            rows that have some; returns logits ``(rows, tokens, vocabulary)``, or an object that has them as
            ``logits``.
        entropy_at_temperature: undecided by the documentation, see :class:`~pytest_trlcompat.reference.Undecided`.
        padded: with prompts padded in front, as a trainer does it, where rounding must be as close as possible.

    Raises:
        ValueError: if the model is in training mode and has dropout: then no numbers are right.
    """
    if getattr(model, "training", False):
        dropping = [name for name, module in model.named_modules() if getattr(module, "p", 0) and _is_dropout(module)]
        if dropping:
            raise ValueError(f"the model drops out at random in {dropping[0]}; call model.eval(), or set dropout to 0")
    if padded:
        # (R, P + C)
        ids = torch.cat([tokens.prompt_ids, tokens.completion_ids], 1)
        mask = torch.cat([tokens.prompt_mask, tokens.completion_mask], 1)
        starts = (tokens.prompt_ids.shape[1] - tokens.prompt_mask.sum(1)).tolist()
        inputs = joined_inputs(tokens.inputs, starts, ids.shape[1]) if tokens.inputs else {}
        # (R, C, V): logits at a token are of the next one.
        logits = _logits(model, ids, mask, inputs)[:, tokens.prompt_ids.shape[1] - 1 : -1]
        logprobs, entropies = _scores(logits, tokens.completion_ids, temperature, entropy_at_temperature)
        return Scores(*(torch.where(tokens.completion_mask, values, 0.0) for values in (logprobs, entropies)))
    padded_rows = []
    rows = tokens.rows()
    for (prompt, completion), logits in zip(rows, _logits_of_rows(model, tokens), strict=True):
        # Logits at a token are of the next one: those of the completion begin at the prompt's last token.
        scores = _scores(logits[len(prompt) - 1 : -1], completion, temperature, entropy_at_temperature)
        gap = tokens.completion_ids.shape[1] - len(completion)
        padded_rows.append([torch.nn.functional.pad(values, (0, gap)) for values in scores])
    logprobs, entropies = (torch.stack(values) for values in zip(*padded_rows, strict=True))
    return Scores(logprobs, entropies)


def _is_dropout(module: Any) -> bool:
    # The base of all of torch's dropout layers.
    return isinstance(module, torch.nn.modules.dropout._DropoutNd)


def _logits_of_rows(model: Any, tokens: Tokens) -> list[Tensor]:
    """Of each row ``(tokens, vocabulary)``."""
    rows = [torch.cat(row) for row in tokens.rows()]
    if not tokens.inputs:
        return output_of_rows(model, rows)
    logits = []
    for ids, inputs in zip(rows, tokens.inputs, strict=True):
        whole = joined_inputs([inputs], [0], len(ids))
        logits.append(_logits(model, ids[None], torch.ones_like(ids[None]).bool(), whole)[0])
    return logits


def _logits(model: Any, ids: Tensor, mask: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    device = next(model.parameters()).device
    more = {name: value.to(device) for name, value in inputs.items()}
    # Positions that are absolute count no padding; of a model that is given images they are its own matter.
    has_positions = "position_ids" in inspect.signature(model.forward).parameters
    if has_positions and not inputs and not bool(mask.all()):
        more["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0).to(device)
    output = model(input_ids=ids.to(device), attention_mask=mask.to(device).long(), **more)
    return widened(getattr(output, "logits", output).cpu())


def _scores(logits: Tensor, ids: Tensor, temperature: float, entropy_at_temperature: bool) -> tuple[Tensor, Tensor]:
    sampled = torch.log_softmax(logits / temperature, -1)
    whole = sampled if entropy_at_temperature else torch.log_softmax(logits, -1)
    return sampled.gather(-1, ids[..., None]).squeeze(-1), -(whole.exp() * whole).sum(-1)


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, weights: Tensor | None = None) -> Tensor:
    """The estimate of each token's divergence from the reference model: ``r - log r - 1``, ``r = pi_ref / pi``.

    Source: DeepSeekMath, equation 4; http://joschu.net/blog/kl-approx.html, where it is called k3. With ``weights``,
    the ratio of policy to old policy, it is the unbiased estimate of DeepSeek-V3.2, section 3.1
    (``use_bias_correction_kl``); the gradient goes through the ratio as well.

    Undecided by the documentation: whether a ratio that ``epsilon`` or ``delta`` clips in the policy term is clipped
    here, too. It is not.

    Args:
        logprobs: ``(R, C)`` of the policy.
        reference_logprobs: ``(R, C)``, without a gradient.
        weights: ``(R, C)``.

    Returns:
        ``(R, C)``, nats, at least 0.
    """
    log_ratio = reference_logprobs - logprobs
    estimate = log_ratio.exp() - log_ratio - 1.0
    return estimate if weights is None else weights * estimate
