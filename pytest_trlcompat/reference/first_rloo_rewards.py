"""The first RLOO: from scores to advantages, one number for each completion."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_trlcompat.reference.first_rloo_settings import FirstRLOOSettings

__all__ = ["CompletionAdvantages", "completion_advantages", "leave_one_out_baselines", "standardised"]


@dataclass(frozen=True)
class CompletionAdvantages:
    """Numbers of ``R`` completions, in the order in which they are made; each ``(R,)``.

    Attributes:
        rewards: scores less the penalty for the divergence, normalised and clipped as is set: what is optimised.
        whitened_rewards: the same where ``whiten_rewards`` is not set.
        baselines: mean of the whitened rewards of the other completions of the prompt.
        advantages: normalised as is set.
    """

    rewards: Tensor
    whitened_rewards: Tensor
    baselines: Tensor
    advantages: Tensor


def completion_advantages(scores: Tensor, kl: Tensor, settings: FirstRLOOSettings) -> CompletionAdvantages:
    """``R(x, y) - 1 / (k - 1) sum over the other completions of R``, of ``R(x, y) = r - beta log(pi / pi_ref)``.

    Source: Ahmadian et al., Back to Basics (https://huggingface.co/papers/2402.14740), equations 2 and 9, and
    https://huggingface.co/docs/trl/v0.21.0/rloo_trainer for what is normalised and clipped.

    Args:
        scores: ``(R,)``, with penalties; on each rank ``rloo_k`` times one completion of every prompt.
        kl: ``(R,)``, the estimate of each completion's divergence from the reference model, nats.

    Raises:
        ValueError: if the rows of a rank are no whole groups.
    """
    penalty = settings.kl_coef * kl
    if settings.undecided.normalised == "scores":
        rewards = _bounded(scores, settings) - penalty
    else:
        rewards = _bounded(scores - penalty, settings)
    whitened = standardised(rewards, settings, keep_mean=True) if settings.whiten_rewards else rewards
    baselines = leave_one_out_baselines(whitened, settings.rloo_k, settings.world_size)
    advantages = whitened - baselines
    if settings.normalize_advantage:
        advantages = standardised(advantages, settings)
    return CompletionAdvantages(rewards, whitened, baselines, advantages)


def _bounded(values: Tensor, settings: FirstRLOOSettings) -> Tensor:
    if settings.normalize_reward:
        values = standardised(values, settings)
    limit = settings.reward_clip_range
    return values if limit is None else values.clamp(-limit, limit)


def standardised(values: Tensor, settings: FirstRLOOSettings, *, keep_mean: bool = False) -> Tensor:
    """Values with a standard deviation of 1, and a mean of 0 or their own: ``(R,)``.

    Whitened rewards keep their mean (Huang et al., policy training, detail 9), which no advantage depends on.
    """
    undecided = settings.undecided
    standardised_parts = []
    # The rows of a rank follow each other.
    for part in values.chunk(settings.world_size if undecided.normalised_over == "rank" else 1):
        mean = part.mean()
        variance = ((part - mean) ** 2).sum() / (part.numel() - undecided.std_correction)
        scaled = (part - mean) / (variance.sqrt() + undecided.std_epsilon)
        standardised_parts.append(scaled + mean if keep_mean else scaled)
    return torch.cat(standardised_parts)


def leave_one_out_baselines(rewards: Tensor, rloo_k: int, ranks: int = 1) -> Tensor:
    """The mean reward of the other completions of each one's prompt: ``(R,)``.

    Args:
        rewards: ``(R,)``; on each rank first one completion of every prompt, then another one of every prompt, as in
            https://huggingface.co/docs/trl/v0.21.0/rloo_trainer#implementation-details.

    Raises:
        ValueError: if the rows of a rank are no whole groups.
    """
    if rewards.numel() % (ranks * rloo_k):
        raise ValueError(f"{rewards.numel()} completions are no whole groups of {rloo_k} on {ranks} ranks")
    # (ranks, rloo_k, prompts)
    groups = rewards.reshape(ranks, rloo_k, -1)
    return ((groups.sum(1, keepdim=True) - groups) / (rloo_k - 1)).reshape(-1)
