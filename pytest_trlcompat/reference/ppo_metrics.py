"""What PPO logs for a batch, over all ranks.

https://huggingface.co/docs/trl/v1.12.0/ppo_trainer#explanation-of-the-logged-metrics
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pytest_trlcompat.reference.metrics import mean_over_tokens
from pytest_trlcompat.reference.on_policy_settings import OnPolicySettings, OnPolicyUndecided
from pytest_trlcompat.reference.ppo_records import Episodes, Experience, PPOMicroBatch, PPOOptimizerStep
from pytest_trlcompat.reference.ppo_settings import PPOSettings
from pytest_trlcompat.reference.tokens import Tokens

__all__ = ["episode_metrics", "response_metrics", "update_metrics"]


class _Sampled(Protocol):
    """What is asked of experience."""

    @property
    def tokens(self) -> Tokens: ...
    @property
    def logprobs(self) -> Tensor: ...
    @property
    def entropies(self) -> Tensor: ...
    @property
    def penalised_scores(self) -> Tensor: ...
    @property
    def kl(self) -> Tensor: ...


def episode_metrics(experience: Experience, episodes: Episodes, settings: PPOSettings) -> dict[str, float]:
    """What is logged of responses and rewards."""
    return response_metrics(experience, episodes, settings, settings.undecided)


def response_metrics(
    experience: _Sampled, episodes: Episodes, settings: OnPolicySettings, undecided: OnPolicyUndecided
) -> dict[str, float]:
    """What PPO and the first RLOO log of responses and rewards.

    - ``objective/kl``: mean over responses of the sum over tokens, as in ``objective/non_score_reward``, whose
      explanation sums over them.
    - ``objective/entropy``: likewise, see ``objective_entropy`` of
      :class:`~pytest_trlcompat.reference.OnPolicyUndecided`.
    - ``objective/non_score_reward``: ``kl_coef`` times the first, see ``non_score_reward_sign``.
    - ``objective/rlhf_reward``: mean of the score less the penalty for the divergence.
    - ``objective/scores``: mean score, with ``missing_eos_penalty``, which is "applied to the score".
    - ``val/num_eos_tokens``: ends of sequence in all responses.
    """
    mask = experience.tokens.completion_mask
    surprise = experience.entropies if undecided.objective_entropy == "exact" else -experience.logprobs
    kl = _by_response(experience.kl, mask)
    penalty = settings.kl_coef * kl
    ends = [list(row).count(settings.eos_token_id) for row in episodes.responses]
    if undecided.eos_counted_in == "kept":
        is_end = (experience.tokens.completion_ids == settings.eos_token_id) & mask
        ends = is_end.sum(1).tolist()
    return {
        "objective/kl": float(kl.mean()),
        "objective/entropy": float(_by_response(surprise, mask).mean()),
        "objective/non_score_reward": undecided.non_score_reward_sign * float(penalty.mean()),
        "objective/rlhf_reward": float((experience.penalised_scores - penalty).mean()),
        "objective/scores": float(experience.penalised_scores.mean()),
        "val/num_eos_tokens": float(sum(ends)),
    }


def _by_response(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum(1)


def update_metrics(
    steps: Sequence[PPOOptimizerStep], experience: Experience, settings: PPOSettings
) -> dict[str, float]:
    """What is logged of all updates of a batch, all epochs and mini-batches together.

    - ``policy/approxkl_avg``: k2 of http://joschu.net/blog/kl-approx.html, ``(log r)^2 / 2``, of the policy and the one
      that sampled; the documentation of ``kl_estimator`` says that k2 "is used for logging purposes".
    - ``policy/clipfrac_avg``, ``val/clipfrac_avg``: the part of the tokens, of the steps, that is clipped.
    - ``policy/entropy_avg``: mean entropy of the policy while it is trained, by token.
    - ``val/ratio``, ``val/ratio_var``: mean and variance of the ratio.
    - ``loss/policy_avg``, ``loss/value_avg``: means over the optimizer steps.
    """
    batches = [batch for step in steps for batch in step.micro_batches]
    over_all = settings.undecided.metrics_mean == "tokens"

    def mean(values: Callable[[PPOMicroBatch], Tensor], mask: Callable[[PPOMicroBatch], Tensor] = _mask) -> float:
        return float(mean_over_tokens([(values(batch), mask(batch)) for batch in batches], over_all))

    def approximate_kl(batch: PPOMicroBatch) -> Tensor:
        return 0.5 * (batch.logprobs - experience.logprobs[list(batch.rows)]) ** 2

    return {
        "policy/approxkl_avg": mean(approximate_kl),
        "policy/clipfrac_avg": mean(lambda batch: batch.policy_clipped.double()),
        "loss/policy_avg": float(torch.stack([step.policy_loss for step in steps]).mean()),
        "loss/value_avg": float(torch.stack([step.value_loss for step in steps]).mean()),
        "val/clipfrac_avg": mean(lambda batch: batch.value_clipped.double(), lambda batch: batch.step_mask),
        "policy/entropy_avg": mean(lambda batch: batch.entropies),
        "val/ratio": mean(lambda batch: batch.ratios),
        "val/ratio_var": _ratio_variance(batches, settings),
    }


def _mask(batch: PPOMicroBatch) -> Tensor:
    return batch.mask


def _ratio_variance(batches: Sequence[PPOMicroBatch], settings: PPOSettings) -> float:
    if settings.undecided.ratio_var_over == "tokens":
        ratios = torch.cat([batch.ratios[batch.mask] for batch in batches])
    else:
        ratios = torch.stack([batch.ratios[batch.mask].mean() for batch in batches])
    return float(((ratios - ratios.mean()) ** 2).sum() / (len(ratios) - 1)) if len(ratios) > 1 else float("nan")
