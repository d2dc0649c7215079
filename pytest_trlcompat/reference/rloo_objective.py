"""RLOO's advantages with their leave-one-out baseline, and the objective of whole completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_trlcompat.reference.rewards import Advantages, mean_of_present, std_of_present, total_rewards

__all__ = ["RLOOAdvantages", "leave_one_out_advantages", "sequence_log_ratios", "sequence_losses"]


@dataclass(frozen=True)
class RLOOAdvantages(Advantages):
    """As :class:`~pytest_trlcompat.reference.Advantages`; totals and their statistics are those that are logged.

    Attributes:
        scores: ``(R,)``, weighted sums of rewards, clipped, without the KL penalty.
        divergences: ``(R,)``, the estimate of each completion's KL divergence; ``None`` where ``beta`` is 0.
        final_rewards: ``(R,)``, totals, clipped, less the KL penalty.
        baselines: ``(R,)``, mean of the final rewards of the other completions of the group.
    """

    scores: Tensor
    divergences: Tensor | None
    final_rewards: Tensor
    baselines: Tensor


def leave_one_out_advantages(
    rewards: Tensor,
    num_generations: int,
    *,
    divergences: Tensor | None = None,
    beta: float = 0.0,
    weights: Sequence[float] | None = None,
    clip_range: tuple[float, float] | None = None,
    clipped: str = "totals",
    logged: str = "totals",
    normalize: bool = False,
    std_correction: int = 1,
    std_epsilon: float = 1e-4,
    no_reward: str = "zero",
) -> RLOOAdvantages:
    """The advantage of each completion, over all ranks.

    The final reward is ``r_i = R_i - beta KL_i``, its baseline the mean of the other final rewards of the group,
    ``b_i = 1 / (G - 1) sum_{j != i} r_j``, the advantage ``A_i = r_i - b_i`` (Back to Basics, equation 7;
    https://huggingface.co/docs/trl/rloo_trainer). ``normalize``: less the mean and divided by the standard deviation
    of all advantages of the generation batch (``normalize_advantages``).

    Undecided by the documentation: what is clipped and what is logged, see ``rewards_clipped`` and ``rewards_logged``
    of :class:`~pytest_trlcompat.reference.RLOOUndecided`; a completion without another one in its group, whose own
    reward is its baseline here.

    Args:
        rewards: ``(R, F)``, NaN for ``None``; rows of a group follow each other.
        divergences: ``(R,)``.
        clip_range: smallest and largest reward.
        clipped: what of it is clipped.
        logged: which rewards are returned as totals, see ``rewards_logged``.

    Raises:
        ValueError: if the rows are no whole groups, and for a wrong number of weights.
    """
    rows = rewards.shape[0]
    if rows % num_generations:
        raise ValueError(f"{rows} completions are no whole groups of {num_generations}")

    def bounded(values: Tensor, kind: str) -> Tensor:
        return values.clamp(*clip_range) if clip_range is not None and clipped == kind else values

    def std(values: Tensor, dim: int) -> Tensor:
        return std_of_present(values, dim, correction=std_correction)

    totals = total_rewards(bounded(rewards, "functions"), weights)
    if no_reward == "left_out":
        totals = totals.masked_fill(rewards.isnan().all(1), float("nan"))
    scores = final = bounded(totals, "totals")
    if logged == "clipped":
        totals = final
    if divergences is not None:
        final = bounded(final - beta * divergences, "with_kl")
    if logged == "final":
        totals = final
    elif logged == "unweighted":
        totals = total_rewards(rewards)
    # (groups, G)
    grouped = final.reshape(-1, num_generations)
    present = ~grouped.isnan()
    others = present.sum(1, keepdim=True) - 1
    present_rewards = grouped.where(present, 0.0)
    means = (present_rewards.sum(1, keepdim=True) - present_rewards) / others.clamp(min=1)
    baselines = means.where(others > 0, present_rewards).reshape(rows)
    advantages = final - baselines
    if normalize:
        advantages = (advantages - mean_of_present(advantages, 0)) / (std(advantages, 0) + std_epsilon)
    of_groups = totals.reshape(-1, num_generations)
    return RLOOAdvantages(
        rewards=rewards,
        totals=totals,
        group_means=mean_of_present(of_groups, 1).expand_as(of_groups).reshape(rows),
        group_stds=std(of_groups, 1).expand_as(of_groups).reshape(rows),
        batch_std=std(totals, 0).squeeze(),
        advantages=advantages.nan_to_num(nan=0.0),
        scores=scores,
        divergences=divergences,
        final_rewards=final,
        baselines=baselines,
    )


def sequence_log_ratios(logprobs: Tensor, other_logprobs: Tensor, mask: Tensor) -> Tensor:
    """``sum_t log pi(o_t) - log pi_other(o_t)`` of each completion: ``(R,)``, nats.

    Source: https://huggingface.co/docs/trl/rloo_trainer: with the reference model it is the estimate of the KL
    divergence, with the old policy the logarithm of the importance ratio of whole completions.

    Args:
        logprobs, other_logprobs: ``(R, C)``.
        mask: ``(R, C)``, tokens that count.
    """
    return torch.where(mask, logprobs - other_logprobs, 0.0).sum(1)


def sequence_losses(ratios: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float) -> Tensor:
    """``-min(w A, clip(w, 1 - epsilon, 1 + epsilon_high) A)`` of each completion: ``(R,)``.

    Where the policy is the one that sampled, its gradient is that of REINFORCE, ``-A log pi``.

    Source: https://huggingface.co/docs/trl/rloo_trainer, "Computing the loss".

    Args:
        ratios: ``(R,)``, of the probabilities of whole completions, with a gradient.
        advantages: ``(R,)``.
    """
    bounded = ratios.clamp(1.0 - epsilon, 1.0 + epsilon_high)
    return -torch.minimum(ratios * advantages, bounded * advantages)
