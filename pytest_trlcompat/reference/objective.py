"""The objective of each token: importance weights, clipping in each form, and the tokens that it leaves out."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_trlcompat.reference.settings import GRPOSettings

__all__ = [
    "HARD_CLIPPED",
    "clipped",
    "entropy_control",
    "high_entropy_mask",
    "importance_weights",
    "on_policy_mask",
    "policy_losses",
    "trajectory_weights",
]

HARD_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Loss types whose objective has PPO's minimum of a clipped and an unclipped term."""


def importance_weights(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: str = "token") -> Tensor:
    """The ratio of policy to old policy, with a gradient.

    ``"token"``: ``pi(o_t) / pi_old(o_t)`` of each token (DeepSeekMath, equation 3). ``"sequence"``: the geometric mean
    of these over a completion's tokens, the same for each of them (GSPO, equation 7; "averages the log-probability
    ratios across valid tokens to produce a single ratio per sequence").

    Args:
        logprobs: ``(R, C)``.
        old_logprobs: ``(R, C)``, of the policy when the completions were sampled.
        mask: ``(R, C)``, tokens that count.

    Returns:
        ``(R, C)``.

    Raises:
        ValueError: for another level.
    """
    log_ratios = logprobs - old_logprobs
    if level == "token":
        return log_ratios.exp()
    if level == "sequence":
        # Where no token counts, 0/0 would be NaN, and a masked NaN still spoils the gradient.
        lengths = mask.sum(1, keepdim=True).clamp(min=1)
        means = torch.where(mask, log_ratios, 0.0).sum(1, keepdim=True) / lengths
        return means.exp().expand_as(log_ratios)
    raise ValueError(f"importance_sampling_level={level!r} is not documented")


def trajectory_weights(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Logarithm of the ratio of the probabilities of whole completions, ``log W = sum log pi - log pi_old``: ``(R,)``.

    Source: VESPO, https://huggingface.co/docs/trl/paper_index; unlike GSPO's ratio without a length's root.
    """
    return torch.where(mask, logprobs - old_logprobs, 0.0).sum(1)


def policy_losses(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, settings: GRPOSettings
) -> Tensor:
    """The negative objective of each token, before masks, KL term and normalisation.

    ``w`` is the importance weight, ``A`` the completion's advantage, ``sg`` stops the gradient.

    ============= =============================================================
    loss type     loss of a token
    ============= =============================================================
    PPO's         ``-min(w A, clip(w, 1 - epsilon, 1 + epsilon_high) A)``
    with delta    ``-min(min(w, delta) A, clip(w, ...) A)``
    ``cispo``     ``-sg(min(w, epsilon_high)) A log pi``
    ``sapo``      ``-4 / tau sigmoid(tau (w - 1)) A``
    ``vespo``     ``-sg(W^k exp(lambda (1 - W))) A log pi``
    ============= =============================================================

    PPO's is that of ``grpo``, ``bnpo``, ``dr_grpo``, ``dapo`` and ``luspo`` (DeepSeekMath, equation 3; DAPO, section
    3.1, for two epsilons), with a second bound by ``delta`` (INTELLECT-2, two-sided clipping). The bound of ``cispo``
    (MiniMax-M1) is no distance from 1: it is what ScaleRL calls epsilon_max. ``tau`` of ``sapo`` (SAPO, as in
    https://huggingface.co/docs/trl/grpo_trainer#loss-types) is ``sapo_temperature_pos`` for a positive advantage,
    ``sapo_temperature_neg`` otherwise. ``W`` of ``vespo`` (VESPO, as in https://huggingface.co/docs/trl/paper_index) is
    the ratio of whole completions; ``k`` and ``lambda`` go by the sign of the advantage, too.

    Undecided by the documentation: whether ``delta`` has a meaning for the last three. It has none here. For ``A = 0``
    every form is 0, so that it does not matter which sign's parameters hold.

    Args:
        logprobs: ``(R, C)``, with a gradient.
        old_logprobs: ``(R, C)``.
        advantages: ``(R,)``.
        mask: ``(R, C)``, tokens that count.

    Returns:
        ``(R, C)``.
    """
    weights = importance_weights(logprobs, old_logprobs, mask, settings.importance_sampling_level)
    # (R, 1): all tokens of a completion have its advantage.
    a = advantages.to(logprobs.dtype)[:, None]
    if settings.loss_type == "cispo":
        return -weights.detach().clamp(max=settings.upper_epsilon) * a * logprobs
    if settings.loss_type == "sapo":
        tau = torch.where(a > 0, settings.sapo_temperature_pos, settings.sapo_temperature_neg).to(a.dtype)
        # A sigmoid's slope at 0 is 1/4: with 4 / tau the gradient at w = 1 is that of w A.
        return -torch.sigmoid(tau * (weights - 1.0)) * 4.0 / tau * a
    if settings.loss_type == "vespo":
        k = torch.where(a > 0, settings.vespo_k_pos, settings.vespo_k_neg)
        decay = torch.where(a > 0, settings.vespo_lambda_pos, settings.vespo_lambda_neg)
        log_w = trajectory_weights(logprobs, old_logprobs, mask).detach()[:, None]
        return -(k * log_w + decay * (1.0 - log_w.exp())).exp().to(a.dtype) * a * logprobs
    bounded = weights.clamp(1.0 - settings.epsilon, 1.0 + settings.upper_epsilon)
    free = weights if settings.delta is None else weights.clamp(max=settings.delta)
    return -torch.minimum(free * a, bounded * a)


def clipped(
    weights: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float, *, by_sign: bool = True
) -> tuple[Tensor, Tensor]:
    """Which tokens are clipped on the lower and on the upper bound: two of ``(R, C)``, boolean.

    Source: ``clip_ratio/*`` in https://huggingface.co/docs/trl/grpo_trainer#logged-metrics.

    Args:
        weights: ``(R, C)``.
        advantages: ``(R,)``.
        by_sign: undecided by the documentation, see ``clipped_by_sign`` of
            :class:`~pytest_trlcompat.reference.Undecided`.
    """
    low, high = weights < 1.0 - epsilon, weights > 1.0 + epsilon_high
    if by_sign:
        low, high = low & (advantages < 0)[:, None], high & (advantages > 0)[:, None]
    return low, high


def on_policy_mask(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, threshold: float | None
) -> Tensor:
    """Which completions stay in the policy term: not those of negative advantage that the policy has left too far.

    A completion is left out if ``A < 0`` and ``mean(log pi_old - log pi) > threshold`` (DeepSeek-V3.2, equation 9;
    ``off_policy_mask_threshold``). It stays in the KL term and in what the loss is divided by.

    Returns:
        ``(R,)``, boolean.
    """
    if threshold is None:
        return torch.ones_like(advantages, dtype=torch.bool)
    left = torch.where(mask, old_logprobs - logprobs.detach(), 0.0).sum(1) / mask.sum(1).clamp(min=1)
    return ~((advantages < 0) & (left > threshold))


def high_entropy_mask(entropies: Tensor, mask: Tensor, quantile: float) -> Tensor:
    """Which tokens stay in the policy term: the part ``quantile`` of those that count with the highest entropies.

    Source: Beyond the 80/20 Rule; "Keeps in the policy loss term only the top-rho quantile of tokens by entropy [...]
    A value of `0.0` masks all but the highest entropy token; `1.0` keeps all tokens" (``top_entropy_quantile``).
    The paper divides by the number of all tokens, so that tokens which are left out still count there.

    Undecided by the documentation: where the threshold lies between two tokens. It is the quantile ``1 - quantile`` by
    linear interpolation, and tokens at the threshold stay.

    Args:
        entropies: ``(R, C)``, of a batch; which batch the paper does not say.
        mask: ``(R, C)``, tokens that count.

    Returns:
        ``(R, C)``, boolean, within ``mask``.
    """
    if quantile >= 1.0 or not mask.any():
        return mask
    threshold = torch.quantile(entropies.detach()[mask], 1.0 - quantile)
    return mask & (entropies >= threshold)


def entropy_control(entropy: float, coefficient: float, settings: GRPOSettings) -> tuple[float, float]:
    """The coefficient of the entropy bonus that this step applies, and the one that the next step starts from.

    "The coefficient is only applied when entropy is at or below `entropy_target`"; then it is "incremented by
    `entropy_coef_delta` when the current entropy is below `entropy_target`, and decremented otherwise", between
    ``entropy_coef_min`` and ``entropy_coef_max`` (``use_adaptive_entropy``; Skywork-OR1, adaptive entropy control).

    Undecided by the documentation: entropy at the target, which increments in the index of papers ("at or below") and
    here; whether the step whose entropy it is already has the new coefficient (it has the old one, as in the paper);
    and which step's entropy is the current one, see ``entropy_control_by`` of
    :class:`~pytest_trlcompat.reference.Undecided`.

    Args:
        entropy: nats, mean over the tokens of the policy term.
    """
    low = entropy <= settings.entropy_target
    moved = coefficient + (settings.entropy_coef_delta if low else -settings.entropy_coef_delta)
    return coefficient if low else 0.0, min(max(moved, settings.entropy_coef_min), settings.entropy_coef_max)
