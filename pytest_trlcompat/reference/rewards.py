"""Rewards of several functions, and the advantages of completions within their groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Advantages", "advantages_of", "mean_of_present", "std_of_present", "total_rewards"]


@dataclass(frozen=True)
class Advantages:
    """Rewards and advantages of ``R`` completions, in groups of ``G`` that follow each other.

    Attributes:
        rewards: ``(R, F)``, of each of the ``F`` functions; NaN where a function gave ``None``.
        totals: ``(R,)``, weighted sums over the functions.
        group_means: ``(R,)``, mean of the totals of each completion's group.
        group_stds: ``(R,)``, their standard deviation.
        batch_std: a scalar, standard deviation of all totals.
        advantages: ``(R,)``.
    """

    rewards: Tensor
    totals: Tensor
    group_means: Tensor
    group_stds: Tensor
    batch_std: Tensor
    advantages: Tensor


def mean_of_present(values: Tensor, dim: int) -> Tensor:
    """Mean of the values that are not NaN along a dimension, which stays with size 1; NaN where all are missing."""
    present = ~values.isnan()
    return values.where(present, 0.0).sum(dim, keepdim=True) / present.sum(dim, keepdim=True)


def std_of_present(values: Tensor, dim: int, *, correction: int = 1) -> Tensor:
    """Standard deviation of the values that are not NaN along a dimension, which stays with size 1.

    Undecided by the documentation: whether the sum of squares of ``n`` values is divided by ``n`` or by ``n - 1``
    (``correction``), and what that of no more than ``correction`` values is: 0 here.
    """
    present = ~values.isnan()
    count = present.sum(dim, keepdim=True)
    squares = ((values - mean_of_present(values, dim)) ** 2).where(present, 0.0).sum(dim, keepdim=True)
    return (squares / (count - correction).clamp(min=1)).sqrt().where(count > correction, 0.0)


def total_rewards(rewards: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """Weighted sum of each completion's rewards, over the functions that gave one.

    "Weights for each reward function. [...] If `None`, all rewards are weighted equally with weight `1.0`"
    (``reward_weights``). "The GRPOTrainer will ignore the `None` rewards returned by the reward functions and only
    consider the rewards returned by the relevant functions" (https://huggingface.co/docs/trl/grpo_trainer, example of
    multi-task rewards).

    Undecided by the documentation: the total of a completion for which every function gave ``None``; it is the empty
    sum, 0. A function's NaN is taken for ``None``. A total is a sum, so that ``weights`` are not divided by their sum.

    Args:
        rewards: ``(R, F)``, NaN for ``None``.
        weights: ``F`` numbers.

    Returns:
        ``(R,)``.

    Raises:
        ValueError: if there are not as many weights as functions.
    """
    if weights is None:
        weights = [1.0] * rewards.shape[1]
    if len(weights) != rewards.shape[1]:
        raise ValueError(f"{len(weights)} reward weights for {rewards.shape[1]} reward functions")
    return (rewards * rewards.new_tensor(list(weights))).where(~rewards.isnan(), 0.0).sum(1)


def advantages_of(
    rewards: Tensor,
    num_generations: int,
    *,
    weights: Sequence[float] | None = None,
    scale_rewards: str | bool = "group",
    aggregation: str = "sum_then_normalize",
    std_correction: int = 1,
    std_epsilon: float = 1e-4,
    no_reward: str = "zero",
) -> Advantages:
    """The advantage of each completion, over all ranks.

    ``sum_then_normalize``: the total less its group's mean, divided by a standard deviation (DeepSeekMath, section
    4.1.2): that of the group, that of all totals of the batch (``"batch"``, Lite PPO, section 4.1.3: group-level mean,
    batch-level standard deviation), or nothing (``"none"``, Dr. GRPO, section 3.2).

    ``normalize_then_sum`` (GDPO, as in https://huggingface.co/docs/trl/paper_index): each function's
    rewards are normalised within each group, summed with the weights, and the sums normalised over the batch.
    Undecided by the documentation: whether ``scale_rewards`` changes this (here not: the equations have no such
    choice), and what a missing reward does (its function contributes nothing to this completion).

    Undecided by the documentation: ``std_correction``, ``std_epsilon`` and ``no_reward``, see
    :class:`~pytest_trlcompat.reference.Undecided`. A total that is left out is NaN.

    Args:
        rewards: ``(R, F)`` of all ranks, NaN for ``None``; rows of a group follow each other.
        num_generations: completions of each group, ``G``.

    Raises:
        ValueError: if the rows are no whole groups, for a wrong number of weights, and for a way that is not
            documented.
    """
    rows = rewards.shape[0]
    if rows % num_generations:
        raise ValueError(f"{rows} completions are no whole groups of {num_generations}")
    totals = total_rewards(rewards, weights)
    if no_reward == "left_out":
        totals = totals.masked_fill(rewards.isnan().all(1), float("nan"))

    def in_groups(values: Tensor) -> Tensor:
        # (R, ...) to (groups, G, ...)
        return values.reshape(-1, num_generations, *values.shape[1:])

    def std(values: Tensor, dim: int) -> Tensor:
        return std_of_present(values, dim, correction=std_correction)

    grouped = in_groups(totals)
    # (groups, 1) to (R,): each completion gets the number of its group.
    means = mean_of_present(grouped, 1).expand_as(grouped).reshape(rows)
    stds = std(grouped, 1).expand_as(grouped).reshape(rows)
    batch_std = std(totals, 0).squeeze()
    if aggregation == "normalize_then_sum":
        by_function = in_groups(rewards)
        deviations = by_function - mean_of_present(by_function, 1)
        # Without an epsilon, a group of equal rewards would be 0/0.
        normalised = torch.where(deviations == 0, 0.0, deviations / (std(by_function, 1) + std_epsilon))
        summed = total_rewards(normalised.reshape(rows, -1), weights)
        advantages = (summed - summed.mean()) / (std(summed, 0) + std_epsilon)
    elif aggregation == "sum_then_normalize":
        scales = {"group": stds, True: stds, "batch": batch_std, "none": None, False: None}
        if scale_rewards not in scales:
            raise ValueError(f"scale_rewards={scale_rewards!r} is not documented")
        scale = scales[scale_rewards]
        advantages = totals - means if scale is None else (totals - means) / (scale + std_epsilon)
        # A total that was left out is NaN; its completion has no advantage.
        advantages = advantages.nan_to_num(nan=0.0)
    else:
        raise ValueError(f"multi_objective_aggregation={aggregation!r} is not documented")
    return Advantages(rewards, totals, means, stds, batch_std, advantages)
