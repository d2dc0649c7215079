"""Proximal Policy Optimization from human feedback: one batch, and a training, put together from the other modules.

Sources are the papers on PPO and on generalized advantage estimation (Schulman et al.), Huang et al. ("The N
Implementation Details of RLHF with PPO", https://huggingface.co/blog/the_n_implementation_details_of_rlhf_with_ppo),
and the documentation of each argument and metric. A batch gives experience, by the policy, the value model, the reward
model and the reference model as they are; then policy and value model are trained on it, ``num_ppo_epochs`` times, by
one optimizer step for each mini-batch.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_trlcompat.reference import ppo_metrics, ppo_models, ppo_rewards
from pytest_trlcompat.reference._on_policy import OnPolicyLearner, placed_rows
from pytest_trlcompat.reference._stepping import detached
from pytest_trlcompat.reference.ppo_losses import clipped_policy_losses, clipped_value_losses
from pytest_trlcompat.reference.ppo_records import (
    Episodes,
    Experience,
    PPOLayout,
    PPOMicroBatch,
    PPOOptimizerStep,
    PPOStep,
    check_ppo_layout,
)
from pytest_trlcompat.reference.ppo_settings import PPOSettings
from pytest_trlcompat.reference.records import Layout

__all__ = ["ppo_step", "ppo_train"]


def ppo_step(
    policy: Any,
    value_model: Any,
    episodes: Episodes,
    settings: PPOSettings,
    *,
    reward_model: Any = None,
    reference_model: Any = None,
    layout: PPOLayout | None = None,
    padded: bool = False,
) -> PPOStep:
    """The first batch of a training, with all its optimizer steps.

    Args:
        policy: a ``torch.nn.Module`` without dropout, see :func:`~pytest_trlcompat.reference.score_tokens`.
        value_model: see :func:`~pytest_trlcompat.reference.state_values`; trained with the policy.
        episodes: responses of all ranks; with scores, or there is a ``reward_model``.
        reward_model: see :func:`~pytest_trlcompat.reference.response_scores`.
        reference_model: the untrained policy by default.
        layout: rows of each epoch, mini-batch, micro-batch and rank; by default
            :func:`~pytest_trlcompat.reference.unshuffled_layout`.
        padded: whether policy, reference and value model see rows with padding in front, as in a batch of a trainer.

    Returns:
        Everything that the batch makes, without gradients attached. All models stay as they are.

    Raises:
        ValueError: for responses that are too long, that ranks cannot share, or that have no scores, and as the
            functions of this package.
    """
    (step,) = ppo_train(
        policy,
        value_model,
        [episodes],
        settings,
        reward_model=reward_model,
        reference_model=reference_model,
        layouts=None if layout is None else [layout],
        padded=padded,
    )
    return step


def ppo_train(
    policy: Any,
    value_model: Any,
    batches: Sequence[Episodes],
    settings: PPOSettings,
    *,
    reward_model: Any = None,
    reference_model: Any = None,
    layouts: Sequence[PPOLayout] | None = None,
    padded: bool = False,
) -> tuple[PPOStep, ...]:
    """A training on responses that are given; arguments as for :func:`ppo_step`, one layout for each batch."""
    learner = _Learner(policy, value_model, reward_model, reference_model, settings, padded)
    return learner.train(batches, layouts)


class _Trained(torch.nn.Module):
    """Copies of the policy and the value model, as one model."""

    def __init__(self, policy: Any, value_model: Any) -> None:
        super().__init__()
        # Together, so that what they share stays shared.
        self.policy, self.value_model = copy.deepcopy((policy, value_model))


class _Learner(OnPolicyLearner[PPOSettings, PPOStep]):
    """Everything that lasts from one batch to the next."""

    def __init__(
        self,
        policy: Any,
        value_model: Any,
        reward_model: Any,
        reference_model: Any,
        settings: PPOSettings,
        padded: bool,
    ) -> None:
        super().__init__(_Trained(policy, value_model), reward_model, settings, settings.undecided, padded)
        self.reference_model = policy if reference_model is None else reference_model

    def batch(self, episodes: Episodes, layout: PPOLayout, total: int) -> PPOStep:
        check_ppo_layout(layout, len(episodes.queries), self.settings)
        experience = self._experience(episodes)
        steps = [self._step(experience, mini, total) for epoch in layout for mini in epoch]
        logs = {
            **ppo_metrics.episode_metrics(experience, episodes, self.settings),
            **ppo_metrics.update_metrics(steps, experience, self.settings),
            **self.ended(episodes, steps[-1].learning_rate, total),
        }
        return PPOStep(experience, tuple(steps), logs)

    def _experience(self, episodes: Episodes) -> Experience:
        settings = self.settings
        tokens = self.tokens(episodes)
        mask = tokens.completion_mask
        steps = ppo_rewards.step_mask(mask, settings.has_own_score_step, settings.world_size)
        with torch.no_grad():
            sampled = self.score(self.trained.policy, tokens)
            reference = self.score(self.reference_model, tokens).logprobs
            values = ppo_models.state_values(self.trained.value_model, tokens, steps, padded=self.padded)
        scores = self.scores(episodes, tokens, values.dtype)
        has_eos = self.has_eos(tokens)
        penalised = ppo_rewards.penalised_scores(scores, has_eos, tokens.terminated, settings)
        kl = torch.where(mask, ppo_rewards.divergence(sampled.logprobs, reference, settings.kl_estimator), 0.0)
        rewards = whitened = ppo_rewards.rewards_of(kl, penalised, steps, settings.kl_coef)
        if settings.whiten_rewards:
            whitened = self._whiten(rewards, steps, shift_mean=False)
        estimates = ppo_rewards.advantage_estimates(whitened, values, steps, gamma=settings.gamma, lam=settings.lam)
        return Experience(
            tokens=tokens,
            has_eos=has_eos,
            logprobs=sampled.logprobs,
            reference_logprobs=reference,
            entropies=sampled.entropies,
            step_mask=steps,
            values=values,
            scores=scores,
            penalised_scores=penalised,
            kl=kl,
            rewards=rewards,
            whitened_rewards=whitened,
            # Of the estimates before they are whitened: a return has the scale of the rewards.
            returns=estimates + values,
            advantages=self._whiten(estimates, mask, shift_mean=True),
        )

    def _whiten(self, values: Tensor, mask: Tensor, *, shift_mean: bool) -> Tensor:
        undecided = self.settings.undecided
        parts = self.settings.world_size if undecided.whiten_over == "rank" else 1
        # The rows of a rank follow each other.
        pairs = zip(values.chunk(parts), mask.chunk(parts), strict=True)
        correction = undecided.whiten_correction
        return torch.cat(
            [
                ppo_rewards.whiten(rank_values, rank_mask, shift_mean=shift_mean, correction=correction)
                for rank_values, rank_mask in pairs
            ]
        )

    def _step(self, experience: Experience, layout: Layout, total: int) -> PPOOptimizerStep:
        """One optimizer step: a mini-batch."""
        settings = self.settings
        placed = placed_rows(layout)
        together = [row for _, rows in placed for row in rows]
        groups = [together] if settings.undecided.loss_mean == "tokens" else [rows for _, rows in placed]
        # The shares are of the whole mini-batch, so the losses of its micro-batches add up to its loss.
        shares = [_shares(mask, groups) for mask in (experience.tokens.completion_mask, experience.step_mask)]
        batches = [self._micro_batch(experience, rank, rows, shares) for rank, rows in placed]
        policy_loss = torch.stack([batch.policy_loss for batch in batches]).sum()
        value_loss = torch.stack([batch.value_loss for batch in batches]).sum()
        loss = policy_loss + settings.vf_coef * value_loss
        stepped = self.stepper.step(loss, self.rate(total))
        return PPOOptimizerStep(
            micro_batches=tuple(detached(batch) for batch in batches),
            policy_loss=policy_loss.detach(),
            value_loss=value_loss.detach(),
            loss=loss.detach(),
            **vars(stepped),
        )

    def _micro_batch(
        self, experience: Experience, rank: int, rows: list[int], shares: Sequence[Tensor]
    ) -> PPOMicroBatch:
        """``shares`` are what the losses of tokens and of steps are multiplied by, of the whole batch."""
        settings, undecided = self.settings, self.settings.undecided
        tokens, steps = experience.tokens.of_rows(rows), experience.step_mask[rows]
        scores = self.score(self.trained.policy, tokens)
        values = ppo_models.state_values(self.trained.value_model, tokens, steps, padded=self.padded)
        ratios = (scores.logprobs - experience.logprobs[rows]).exp()
        policy_losses, policy_clipped = clipped_policy_losses(
            ratios, experience.advantages[rows], settings.cliprange, clipped_by=undecided.clipped_by
        )
        value_losses, value_clipped = clipped_value_losses(
            values,
            experience.values[rows],
            experience.returns[rows],
            settings.cliprange_value,
            scale=undecided.value_loss_scale,
            clipped_by=undecided.clipped_by,
        )
        return PPOMicroBatch(
            rank=rank,
            rows=tuple(rows),
            mask=tokens.completion_mask,
            step_mask=steps,
            logprobs=scores.logprobs,
            entropies=scores.entropies,
            values=values,
            ratios=ratios,
            policy_losses=policy_losses,
            value_losses=value_losses,
            policy_clipped=policy_clipped & tokens.completion_mask,
            value_clipped=value_clipped & steps,
            policy_loss=(shares[0][rows].to(policy_losses.dtype) * policy_losses).sum(),
            value_loss=(shares[1][rows].to(value_losses.dtype) * value_losses).sum(),
        )


def _shares(mask: Tensor, groups: Sequence[list[int]]) -> Tensor:
    """What each step is multiplied by for the mean over groups of rows of the means over their steps: ``(R, C)``."""
    shares = torch.zeros(mask.shape, dtype=torch.float64)
    for rows in groups:
        shares[rows] = mask[rows] / (len(groups) * mask[rows].sum().double())
    return shares
