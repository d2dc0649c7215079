"""From scores to advantages: penalties, rewards of each token, whitening, and generalized advantage estimation."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_trlcompat.reference.on_policy_settings import OnPolicySettings
from pytest_trlcompat.reference.policy import kl_estimate

__all__ = ["advantage_estimates", "divergence", "penalised_scores", "rewards_of", "step_mask", "whiten"]

_WHITEN_EPSILON = 1e-8


def penalised_scores(scores: Tensor, has_eos: Tensor, has_stop_token: Tensor, settings: OnPolicySettings) -> Tensor:
    """The scores, less ``missing_eos_penalty`` where a response has no end of sequence.

    "subtracts a static scalar penalty from the score of completions that do not end with an EOS token"
    (https://huggingface.co/docs/trl/v1.12.0/ppo_trainer#cookbook); until 0.10 a value in place of the score, where
    there is no stop token.

    Args:
        scores, has_eos, has_stop_token: ``(R,)``, the last two boolean.
    """
    if settings.non_eos_penalty:
        scores = torch.where(has_stop_token, scores, settings.penalty_reward_value)
    if settings.missing_eos_penalty is not None:
        scores = scores - settings.missing_eos_penalty * (~has_eos).to(scores.dtype)
    return scores


def divergence(logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate of each token's divergence from the reference model, nats: ``(R, C)``.

    Source: http://joschu.net/blog/kl-approx.html, which ``kl_estimator`` refers to: with ``r = pi_ref / pi``, k1 is
    ``-log r``, and k3 is ``(r - 1) - log r``.
    """
    return logprobs - reference_logprobs if estimator == "k1" else kl_estimate(logprobs, reference_logprobs)


def step_mask(mask: Tensor, own_score_step: bool, ranks: int = 1) -> Tensor:
    """Steps that have a reward and a value: tokens that count, and the one after them where there is place.

    Args:
        mask: ``(R, C)``, true for the first tokens of each row.
        own_score_step: see ``score_at`` of :class:`~pytest_trlcompat.reference.PPOUndecided`.
        ranks: how many share the rows; the longest response of each has no place.
    """
    if not own_score_step:
        return mask
    # Where a row fills the width, its last token comes round to its first, which counts anyway.
    return torch.cat([(rank_mask | rank_mask.roll(1, 1)) & rank_mask.any(0) for rank_mask in mask.chunk(ranks)])


def rewards_of(kl: Tensor, scores: Tensor, steps: Tensor, kl_coef: float) -> Tensor:
    """``-kl_coef * kl`` of each token, and the score at the last step: ``(R, C)``.

    Source: Huang et al., policy training, detail 8, with the sign of a penalty: "to discourage the policy to be very
    different from the original policy"; Ziegler et al., equation 2, ``R = r - beta log(pi / rho)``.

    Args:
        kl: ``(R, C)``, 0 where no token counts.
        scores: ``(R,)``.
        steps: ``(R, C)``, see :func:`step_mask`.
    """
    rewards = -kl_coef * kl
    rows = torch.arange(len(scores))
    # The steps of a row are its first ones, so their number says where the last one is.
    last = steps.sum(1) - 1
    return rewards.index_put((rows, last), rewards[rows, last] + scores.to(rewards.dtype))


def whiten(values: Tensor, mask: Tensor, *, shift_mean: bool, correction: int) -> Tensor:
    """The values that count with variance 1 and mean 0 (``shift_mean``) or their own mean; 0 elsewhere.

    Source: Huang et al., policy training, detail 9, whose epsilon is 1e-8; rewards keep their mean, advantages do not.

    Args:
        values, mask: ``(R, C)``.
        correction: see ``whiten_correction`` of :class:`~pytest_trlcompat.reference.PPOUndecided`.
    """
    counted = values[mask]
    mean = counted.mean()
    variance = ((counted - mean) ** 2).sum() / (counted.numel() - correction)
    whitened = (values - mean) * torch.rsqrt(variance + _WHITEN_EPSILON)
    return torch.where(mask, whitened if shift_mean else whitened + mean, 0.0)


def advantage_estimates(rewards: Tensor, values: Tensor, steps: Tensor, *, gamma: float, lam: float) -> Tensor:
    """``A_t = sum over l of (gamma lam)^l delta_{t+l}``, ``delta_t = r_t + gamma V(s_{t+1}) - V(s_t)``: ``(R, C)``.

    An episode ends with its last step, so that nothing is expected after it, whether the response was truncated or not.

    Source: Schulman et al., High-Dimensional Continuous Control Using Generalized Advantage Estimation, equation 16.

    Args:
        rewards, values: ``(R, C)``.
        steps: ``(R, C)``, true for the first steps of each row; estimates are 0 elsewhere.
    """
    advantages = torch.zeros_like(values)
    following, next_value = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    # Backwards: `following` is the estimate of the next step, 0 beyond the end of the episode.
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        following = torch.where(steps[:, t], delta + gamma * lam * following, 0.0)
        next_value = torch.where(steps[:, t], values[:, t], 0.0)
        advantages[:, t] = following
    return advantages
