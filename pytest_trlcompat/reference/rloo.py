"""REINFORCE Leave-One-Out as TRL trains with it from 0.22 on: one step, a training, and an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_trlcompat.reference import metrics
from pytest_trlcompat.reference._sampling import (
    Part,
    SamplingLearner,
    evaluated,
    stepped,
    trained,
    without_repeats,
)
from pytest_trlcompat.reference.objective import clipped
from pytest_trlcompat.reference.records import Evaluation, Generation, Layout, Rollout
from pytest_trlcompat.reference.rloo_objective import (
    RLOOAdvantages,
    leave_one_out_advantages,
    sequence_log_ratios,
    sequence_losses,
)
from pytest_trlcompat.reference.settings import RLOOSettings
from pytest_trlcompat.reference.tokens import Tokens

__all__ = ["RLOOMicroBatch", "RLOOStep", "rloo_evaluate", "rloo_step", "rloo_train", "rloo_training_metrics"]


@dataclass(frozen=True)
class RLOOMicroBatch:
    """What one rank makes of one micro-batch; ``R`` rows of a generation, ``C`` as wide as it.

    Attributes:
        generation: index among the step's generations.
        rank: which rank.
        rows: of the generation.
        mask: ``(R, C)``, tokens that count in the loss.
        logprobs: ``(R, C)``, of the policy.
        entropies: ``(R, C)``, nats.
        weights: ``(R,)``, ratio of policy to old policy of whole completions.
        losses: ``(R,)``, negative objective of each completion; 0 of one that is excluded.
        loss: a scalar, its part of the step's loss, without the auxiliary loss.
        aux_loss: a scalar, the auxiliary loss of a mixture of experts over its rows, prompts included; ``None`` where
            ``router_aux_loss_coef`` is 0.
    """

    generation: int
    rank: int
    rows: tuple[int, ...]
    mask: Tensor
    logprobs: Tensor
    entropies: Tensor
    weights: Tensor
    losses: Tensor
    loss: Tensor
    aux_loss: Tensor | None = None


@dataclass(frozen=True)
class RLOOStep:
    """One optimizer step over all ranks; fields and their fields are in the order in which a step makes them.

    Attributes:
        generations: those that its micro-batches are of; their ``advantages`` are :class:`RLOOAdvantages`.
        micro_batches: by time, then by rank.
        loss: a scalar, the sum of the micro-batches' losses, and the mean of their auxiliary losses.
        gradients: of the loss, by the parameter's name, before clipping.
        grad_norm: a scalar, before clipping.
        clipped_gradients: by name.
        learning_rate: of this step.
        weights: of the trained parameters after the step, by name.
        logs: what is logged for this step, by the names of https://huggingface.co/docs/trl/rloo_trainer#logged-metrics.
    """

    generations: tuple[Generation, ...]
    micro_batches: tuple[RLOOMicroBatch, ...]
    loss: Tensor
    gradients: Mapping[str, Tensor]
    grad_norm: Tensor
    clipped_gradients: Mapping[str, Tensor]
    learning_rate: float
    weights: Mapping[str, Tensor]
    logs: Mapping[str, float]


class _Learner(SamplingLearner[RLOOSettings, RLOOMicroBatch, RLOOStep]):
    step_record = RLOOStep

    def advantages(
        self,
        rollout: Rollout,
        num_generations: int,
        tokens: Tokens,
        old_logprobs: Tensor,
        reference_logprobs: Tensor | None,
    ) -> RLOOAdvantages:
        settings = self.settings
        divergences = None
        if reference_logprobs is not None:
            divergences = sequence_log_ratios(old_logprobs, reference_logprobs, tokens.completion_mask)
        return leave_one_out_advantages(
            rollout.reward_tensor(old_logprobs.dtype),
            num_generations,
            divergences=divergences,
            beta=settings.beta,
            weights=settings.reward_weights,
            clip_range=settings.reward_clip_range,
            clipped=settings.undecided.rewards_clipped,
            logged=settings.undecided.rewards_logged,
            normalize=settings.normalize_advantages,
            std_correction=settings.undecided.std_correction,
            std_epsilon=settings.undecided.std_epsilon,
            no_reward=settings.undecided.no_reward,
        )

    def forward(self, parts: Sequence[Part]) -> list[RLOOMicroBatch]:
        settings = self.settings
        generations = without_repeats([part[0] for part in parts])
        count = len(parts) * settings.world_size
        micro_batches = []
        for generation, _, ranks in parts:
            index = next(place for place, other in enumerate(generations) if other is generation)
            for rank, rows in enumerate(ranks):
                row_list, tokens = list(rows), generation.tokens.of_rows(rows)
                scores = self.score(self.model, tokens)
                log_ratios = sequence_log_ratios(scores.logprobs, generation.old_logprobs[row_list], tokens.loss_mask)
                advantages = generation.advantages.advantages[row_list].to(log_ratios.dtype)
                counts = tokens.loss_mask.any(1)
                losses = sequence_losses(log_ratios.exp(), advantages, settings.epsilon, settings.upper_epsilon)
                # Without a token that counts, the ratio is 1, which would leave a loss of -A.
                losses = losses.where(counts, 0.0)
                size = len(row_list) if settings.undecided.masked_completions_count else int(counts.sum())
                micro_batches.append(
                    RLOOMicroBatch(
                        generation=index,
                        rank=rank,
                        rows=tuple(rows),
                        mask=tokens.loss_mask,
                        logprobs=scores.logprobs,
                        entropies=scores.entropies,
                        weights=log_ratios.exp(),
                        losses=losses,
                        loss=losses.sum() / (count * max(size, 1)),
                        aux_loss=self.aux_loss(tokens),
                    )
                )
        return micro_batches

    def generation_metrics(self, generation: Generation, rollout: Rollout, evaluation: bool) -> dict[str, float]:
        """As GRPO's, and ``kl``; ``frac_reward_zero_std``, "all answers are correct or incorrect", knows no penalty."""
        logs = super().generation_metrics(generation, rollout, evaluation)
        advantages = generation.advantages
        assert isinstance(advantages, RLOOAdvantages)
        settings = self.settings
        if advantages.divergences is not None:
            logs["kl"] = self._mean_divergence(advantages.divergences, generation.tokens.completion_mask.sum(1))
        size = (settings.num_generations_eval if evaluation else None) or settings.num_generations
        logs["frac_reward_zero_std"] = metrics.part_without_spread(advantages.scores, size, settings)
        return logs

    def _mean_divergence(self, divergences: Tensor, tokens: Tensor) -> float:
        """By ``kl_logged_over``, of completions ``(R,)`` with so many tokens each; ranks have equal parts of them."""
        settings = self.settings
        counts = tokens if settings.undecided.kl_logged_over == "tokens" else torch.ones_like(tokens)
        parts = settings.world_size if settings.undecided.metrics_mean == "ranks" else 1
        # (R,) to (ranks, rows of a rank), which follow each other; with one part, of all ranks.
        sums, counted = divergences.view(parts, -1).sum(1), counts.view(parts, -1).sum(1)
        return float((sums / counted).mean())

    def training_metrics(
        self, batches: Sequence[RLOOMicroBatch], generations: Sequence[Generation]
    ) -> dict[str, float]:
        return rloo_training_metrics(batches, generations, self.settings)


def rloo_training_metrics(
    micro_batches: Sequence[RLOOMicroBatch], generations: Sequence[Generation], settings: RLOOSettings
) -> dict[str, float]:
    """What is logged of tokens that are trained on, all micro-batches and ranks together.

    - ``entropy``: mean over tokens; those of excluded completions are left out.
    - ``aux_loss``: mean of the micro-batches' auxiliary losses; where ``router_aux_loss_coef`` is not 0.
    - ``clip_ratio/low_mean``, ``high_mean``, ``region_mean``: the part of the completions that is clipped on the lower
      bound, the upper one, either; ``clip_ratio/low_min``, ``high_max``: the smallest and the largest of any.

    Undecided by the documentation: ``metrics_mean``, ``clipped_by_sign``, ``clip_extremes_of`` and
    ``masked_completions_in_clip_ratios``, see :class:`~pytest_trlcompat.reference.SamplingUndecided`.
    """
    pairs = [(batch.entropies, batch.mask) for batch in micro_batches]
    logs = {"entropy": metrics.average_over_tokens(pairs, settings)}
    if auxiliary := [float(batch.aux_loss) for batch in micro_batches if batch.aux_loss is not None]:
        logs["aux_loss"] = sum(auxiliary) / len(auxiliary)
    sides, masks = [], []
    for batch in micro_batches:
        advantages = generations[batch.generation].advantages.advantages[list(batch.rows)]
        by_sign = settings.undecided.clipped_by_sign
        # (R, 1), in the place of a ratio for each token.
        weights = batch.weights[:, None]
        sides.append(clipped(weights, advantages, settings.epsilon, settings.upper_epsilon, by_sign=by_sign))
        masks.append(batch.mask.any(1, keepdim=True) | settings.undecided.masked_completions_in_clip_ratios)
    return logs | metrics.clip_ratios(sides, masks, settings)


def rloo_step(
    model: Any,
    rollout: Rollout,
    settings: RLOOSettings,
    *,
    reference_model: Any = None,
    old_model: Any = None,
    layout: Layout | None = None,
    padded: bool = False,
) -> RLOOStep:
    """The first optimizer step of a training, over all completions of a rollout.

    The loss of a micro-batch is the mean over its completions, that of a step the mean over ranks and micro-batches.

    Args:
        model, rollout, reference_model, old_model, layout, padded: as for
            :func:`~pytest_trlcompat.reference.grpo_step`.

    Returns:
        Everything that the step makes, without gradients attached.

    Raises:
        ValueError: for rows that are no whole groups or that ranks cannot share, and as the functions of this package.
    """
    return stepped(_Learner(model, settings, reference_model, padded), rollout, layout, old_model)


def rloo_train(
    model: Any,
    rollouts: Sequence[Rollout],
    settings: RLOOSettings,
    *,
    reference_model: Any = None,
    layouts: Sequence[Layout] | None = None,
    padded: bool = False,
) -> tuple[RLOOStep, ...]:
    """A training on completions that are given; as :func:`~pytest_trlcompat.reference.grpo_train`.

    The KL penalty is computed once, with the policy that sampled: "the KL is defined with respect to this policy".

    Raises:
        ValueError: as :func:`rloo_step`, and if the micro-batches are no whole number of optimizer steps.
    """
    return trained(_Learner(model, settings, reference_model, padded), rollouts, layouts)


def rloo_evaluate(
    model: Any,
    rollouts: Sequence[Rollout],
    settings: RLOOSettings,
    *,
    reference_model: Any = None,
    padded: bool = False,
) -> Evaluation:
    """An evaluation: the loss and the metrics of training; as :func:`~pytest_trlcompat.reference.grpo_evaluate`.

    Raises:
        ValueError: for no rollout, and as :func:`rloo_step`.
    """
    with torch.no_grad():
        return evaluated(_Learner(model, settings, reference_model, padded), rollouts)
