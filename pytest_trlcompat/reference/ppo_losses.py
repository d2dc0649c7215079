"""PPO's clipped losses of the policy and of the value function, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["clipped_policy_losses", "clipped_value_losses"]


def clipped_policy_losses(
    ratios: Tensor, advantages: Tensor, cliprange: float, *, clipped_by: str = "objective"
) -> tuple[Tensor, Tensor]:
    """``-min(r A, clip(r, 1 - cliprange, 1 + cliprange) A)`` of each token, and which are clipped: two of ``(R, C)``.

    Source: Schulman et al., Proximal Policy Optimization Algorithms, equation 7.

    Args:
        ratios: ``(R, C)``, of policy to the policy that sampled, with a gradient.
        advantages: ``(R, C)``.
        clipped_by: see :class:`~pytest_trlcompat.reference.PPOUndecided`.
    """
    free = ratios * advantages
    bounded = ratios.clamp(1.0 - cliprange, 1.0 + cliprange) * advantages
    out_of_range = (ratios < 1.0 - cliprange) | (ratios > 1.0 + cliprange)
    return -torch.minimum(free, bounded), bounded < free if clipped_by == "objective" else out_of_range


def clipped_value_losses(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    cliprange: float,
    *,
    scale: float = 0.5,
    clipped_by: str = "objective",
) -> tuple[Tensor, Tensor]:
    """``scale * max((V - R)^2, (V_clip - R)^2)``, ``V_clip`` no further than ``cliprange`` from the old value.

    Source: Huang et al., policy training, detail 10: "clipped [...] in a similar fashion as the policy objective", that
    is pessimistically.

    Args:
        values, old_values, returns: ``(R, C)``, the first with a gradient.

    Returns:
        The losses, and which are clipped: two of ``(R, C)``.
    """
    bounded = torch.maximum(torch.minimum(values, old_values + cliprange), old_values - cliprange)
    free_error, bounded_error = (values - returns) ** 2, (bounded - returns) ** 2
    is_clipped = bounded_error > free_error if clipped_by == "objective" else bounded != values
    return scale * torch.maximum(free_error, bounded_error), is_clipped
