"""What the first RLOO logs for a batch, over all ranks.

https://huggingface.co/docs/trl/v0.21.0/rloo_trainer#explanation-of-the-logged-metrics
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_trlcompat.reference.first_rloo_records import (
    FirstRLOOExperience,
    FirstRLOOMicroBatch,
    FirstRLOOOptimizerStep,
)
from pytest_trlcompat.reference.first_rloo_settings import FirstRLOOSettings
from pytest_trlcompat.reference.metrics import mean_over_tokens
from pytest_trlcompat.reference.ppo_metrics import response_metrics
from pytest_trlcompat.reference.ppo_records import Episodes

__all__ = ["episode_metrics", "update_metrics"]


def episode_metrics(
    experience: FirstRLOOExperience, episodes: Episodes, settings: FirstRLOOSettings
) -> dict[str, float]:
    """What is logged of responses and rewards: as in PPO, see
    :func:`~pytest_trlcompat.reference.ppo_metrics.response_metrics`.

    ``objective/scores`` are "the mean scores returned by the reward model", which are not normalised;
    ``objective/rlhf_reward`` is the mean of what is optimised.
    """
    return {
        **response_metrics(experience, episodes, settings, settings.undecided),
        "objective/rlhf_reward": float(experience.credit.rewards.mean()),
    }


def update_metrics(steps: Sequence[FirstRLOOOptimizerStep], settings: FirstRLOOSettings) -> dict[str, float]:
    """What is logged of all updates of a batch, all epochs and mini-batches together.

    - ``policy/approxkl_avg``: k2 of http://joschu.net/blog/kl-approx.html, ``(log r)^2 / 2``, of the policy and the one
      that sampled.
    - ``policy/clipfrac_avg``: the part of the completions that is clipped.
    - ``policy/entropy_avg``: mean entropy of the policy while it is trained, by token.
    - ``val/ratio``, ``val/ratio_var``: mean and variance of the ratio.
    - ``loss/policy_avg``: mean over the optimizer steps.

    ``val/clipfrac_avg`` is of a value function, which there is not.
    """
    undecided = settings.undecided
    batches = [batch for step in steps for batch in step.micro_batches]
    over_all = undecided.metrics_mean == "tokens"
    return {
        "policy/approxkl_avg": _mean(
            [_squared(batch.log_ratios, batch, undecided.approximate_kl_of) for batch in batches], over_all
        ),
        "policy/clipfrac_avg": _mean([_of_completions(batch.clipped.double()) for batch in batches], over_all),
        "loss/policy_avg": float(torch.stack([step.loss for step in steps]).mean()),
        "policy/entropy_avg": _mean([(batch.entropies, batch.mask) for batch in batches], over_all),
        "val/ratio": _mean([_ratios(batch, undecided.ratio_of) for batch in batches], over_all),
        "val/ratio_var": _variance(
            [_ratios(batch, undecided.ratio_of) for batch in batches], undecided.ratio_var_over == "tokens"
        ),
    }


def _squared(log_ratios: Tensor, batch: FirstRLOOMicroBatch, of: str) -> tuple[Tensor, Tensor]:
    if of == "tokens":
        return 0.5 * log_ratios**2, batch.mask
    return _of_completions(0.5 * log_ratios.sum(1) ** 2)


def _ratios(batch: FirstRLOOMicroBatch, of: str) -> tuple[Tensor, Tensor]:
    return (batch.log_ratios.exp(), batch.mask) if of == "tokens" else _of_completions(batch.ratios)


def _of_completions(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values ``(R,)`` and that each of them counts."""
    return values, torch.ones_like(values, dtype=torch.bool)


def _mean(pairs: Sequence[tuple[Tensor, Tensor]], over_all: bool) -> float:
    return float(mean_over_tokens(pairs, over_all))


def _variance(pairs: Sequence[tuple[Tensor, Tensor]], over_all: bool) -> float:
    if over_all:
        values = torch.cat([ratios[mask] for ratios, mask in pairs])
    else:
        values = torch.stack([ratios[mask].mean() for ratios, mask in pairs])
    return float(((values - values.mean()) ** 2).sum() / (len(values) - 1)) if len(values) > 1 else float("nan")
