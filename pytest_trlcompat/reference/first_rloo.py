"""REINFORCE Leave-One-Out as TRL trained with it up to 0.21, in the way of PPO: one batch, and a training.

Sources are Ahmadian et al., Back to Basics (https://huggingface.co/papers/2402.14740), Huang et al., A2C is a special
case of PPO (https://huggingface.co/papers/2205.09123), the documentation of each argument, and
https://huggingface.co/docs/trl/v0.21.0/rloo_trainer: RLOO "models the entire completion as a single action", has the
mean score of the other completions of a prompt for a baseline in place of a value function, and is otherwise trained as
PPO. A batch gives experience by the policy, the reward model and the reference model as they are; then the policy is
trained on it, ``num_ppo_epochs`` times, by one optimizer step for each mini-batch.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from pytest_trlcompat.reference import first_rloo_metrics, ppo_rewards
from pytest_trlcompat.reference._on_policy import OnPolicyLearner, placed_rows
from pytest_trlcompat.reference._stepping import detached
from pytest_trlcompat.reference.first_rloo_records import (
    FirstRLOOExperience,
    FirstRLOOMicroBatch,
    FirstRLOOOptimizerStep,
    FirstRLOOStep,
)
from pytest_trlcompat.reference.first_rloo_rewards import completion_advantages
from pytest_trlcompat.reference.first_rloo_settings import FirstRLOOSettings
from pytest_trlcompat.reference.ppo_losses import clipped_policy_losses
from pytest_trlcompat.reference.ppo_records import Episodes, PPOLayout, check_ppo_layout
from pytest_trlcompat.reference.records import Layout

__all__ = ["first_rloo_step", "first_rloo_train"]


def first_rloo_step(
    policy: Any,
    episodes: Episodes,
    settings: FirstRLOOSettings,
    *,
    reward_model: Any = None,
    reference_model: Any = None,
    layout: PPOLayout | None = None,
    padded: bool = False,
) -> FirstRLOOStep:
    """The first batch of a training, with all its optimizer steps.

    Args:
        policy: a ``torch.nn.Module`` without dropout, see :func:`~pytest_trlcompat.reference.score_tokens`.
        episodes: responses of all ranks, on each ``rloo_k`` times one of every prompt; with scores, or there is a
            ``reward_model``.
        reward_model: see :func:`~pytest_trlcompat.reference.response_scores`.
        reference_model: the untrained policy by default.
        layout: rows of each epoch, mini-batch, micro-batch and rank; by default
            :func:`~pytest_trlcompat.reference.unshuffled_layout`.
        padded: whether policy and reference see rows with padding in front, as in a batch of a trainer.

    Returns:
        Everything that the batch makes, without gradients attached. All models stay as they are.

    Raises:
        ValueError: for responses that are too long, that ranks cannot share, that are no whole groups of ``rloo_k``, or
            that have no scores, and as the functions of this package.
    """
    (step,) = first_rloo_train(
        policy,
        [episodes],
        settings,
        reward_model=reward_model,
        reference_model=reference_model,
        layouts=None if layout is None else [layout],
        padded=padded,
    )
    return step


def first_rloo_train(
    policy: Any,
    batches: Sequence[Episodes],
    settings: FirstRLOOSettings,
    *,
    reward_model: Any = None,
    reference_model: Any = None,
    layouts: Sequence[PPOLayout] | None = None,
    padded: bool = False,
) -> tuple[FirstRLOOStep, ...]:
    """A training on responses that are given; arguments as for :func:`first_rloo_step`, one layout for each batch."""
    learner = _Learner(policy, reward_model, reference_model, settings, padded)
    return learner.train(batches, layouts)


class _Learner(OnPolicyLearner[FirstRLOOSettings, FirstRLOOStep]):
    """Everything that lasts from one batch to the next."""

    def __init__(
        self, policy: Any, reward_model: Any, reference_model: Any, settings: FirstRLOOSettings, padded: bool
    ) -> None:
        super().__init__(copy.deepcopy(policy), reward_model, settings, settings.undecided, padded)
        self.reference_model = policy if reference_model is None else reference_model

    def batch(self, episodes: Episodes, layout: PPOLayout, total: int) -> FirstRLOOStep:
        check_ppo_layout(layout, len(episodes.queries), self.settings)
        experience = self._experience(episodes)
        steps = [self._step(experience, mini, total) for epoch in layout for mini in epoch]
        logs = {
            **first_rloo_metrics.episode_metrics(experience, episodes, self.settings),
            **first_rloo_metrics.update_metrics(steps, self.settings),
            **self.ended(episodes, steps[-1].learning_rate, total),
        }
        return FirstRLOOStep(experience, tuple(steps), logs)

    def _experience(self, episodes: Episodes) -> FirstRLOOExperience:
        tokens = self.tokens(episodes)
        with torch.no_grad():
            sampled = self.score(self.trained, tokens)
            reference = self.score(self.reference_model, tokens).logprobs
        scores = self.scores(episodes, tokens, sampled.logprobs.dtype)
        has_eos = self.has_eos(tokens)
        penalised = ppo_rewards.penalised_scores(scores, has_eos, tokens.terminated, self.settings)
        kl = torch.where(tokens.completion_mask, ppo_rewards.divergence(sampled.logprobs, reference, "k1"), 0.0)
        return FirstRLOOExperience(
            tokens=tokens,
            has_eos=has_eos,
            logprobs=sampled.logprobs,
            reference_logprobs=reference,
            entropies=sampled.entropies,
            scores=scores,
            penalised_scores=penalised,
            kl=kl,
            credit=completion_advantages(penalised, kl.sum(1), self.settings),
        )

    def _step(self, experience: FirstRLOOExperience, layout: Layout, total: int) -> FirstRLOOOptimizerStep:
        """One optimizer step: a mini-batch."""
        placed = placed_rows(layout)
        count = sum(len(rows) for _, rows in placed)
        batches = [self._micro_batch(experience, rank, rows, count) for rank, rows in placed]
        loss = torch.stack([batch.loss for batch in batches]).sum()
        stepped = self.stepper.step(loss, self.rate(total))
        return FirstRLOOOptimizerStep(
            micro_batches=tuple(detached(batch) for batch in batches), loss=loss.detach(), **vars(stepped)
        )

    def _micro_batch(
        self, experience: FirstRLOOExperience, rank: int, rows: list[int], count: int
    ) -> FirstRLOOMicroBatch:
        """``count`` is that of the mini-batch's completions."""
        tokens = experience.tokens.of_rows(rows)
        mask = tokens.completion_mask
        scores = self.score(self.trained, tokens)
        log_ratios = torch.where(mask, scores.logprobs - experience.logprobs[rows], 0.0)
        ratios = log_ratios.sum(1).exp()
        losses, clipped = clipped_policy_losses(
            ratios,
            experience.credit.advantages[rows],
            self.settings.cliprange,
            clipped_by=self.settings.undecided.clipped_by,
        )
        return FirstRLOOMicroBatch(
            rank=rank,
            rows=tuple(rows),
            mask=mask,
            logprobs=scores.logprobs,
            entropies=scores.entropies,
            log_ratios=log_ratios,
            ratios=ratios,
            losses=losses,
            clipped=clipped,
            loss=losses.sum() / count,
        )
