"""What lasts from one step of GRPO to the next, and how a step is put together from the other modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_trlcompat.reference import metrics
from pytest_trlcompat.reference._sampling import Part, SamplingLearner, without_repeats
from pytest_trlcompat.reference.normalisation import token_shares
from pytest_trlcompat.reference.objective import (
    entropy_control,
    high_entropy_mask,
    importance_weights,
    on_policy_mask,
    policy_losses,
)
from pytest_trlcompat.reference.policy import Scores, kl_estimate
from pytest_trlcompat.reference.records import Generation, GRPOStep, MicroBatch, Rollout
from pytest_trlcompat.reference.rewards import Advantages, advantages_of
from pytest_trlcompat.reference.settings import GRPOSettings
from pytest_trlcompat.reference.tokens import Tokens

__all__ = ["Learner"]


class Learner(SamplingLearner[GRPOSettings, MicroBatch, GRPOStep]):
    """A copy of a policy that is trained, with everything that lasts from one step to the next."""

    step_record = GRPOStep

    def __init__(self, model: Any, settings: GRPOSettings, reference_model: Any, padded: bool) -> None:
        super().__init__(model, settings, reference_model, padded)
        self.entropy_coef = settings.entropy_coef
        self.previous_entropy: float | None = None

    def advantages(
        self,
        rollout: Rollout,
        num_generations: int,
        tokens: Tokens,
        old_logprobs: Tensor,
        reference_logprobs: Tensor | None,
    ) -> Advantages:
        settings = self.settings
        return advantages_of(
            rollout.reward_tensor(old_logprobs.dtype),
            num_generations,
            weights=settings.reward_weights,
            scale_rewards=settings.scale_rewards,
            aggregation=settings.multi_objective_aggregation,
            std_correction=settings.undecided.std_correction,
            std_epsilon=settings.undecided.std_epsilon,
            no_reward=settings.undecided.no_reward,
        )

    def forward(self, parts: Sequence[Part]) -> list[MicroBatch]:
        """The micro-batches of a step, with gradients attached."""
        generations = without_repeats([part[0] for part in parts])
        step_tokens = sum(self._active_tokens(part[0], rows) for part in parts for rows in part[2])
        is_own_generation = self.settings.undecided.active_tokens_of == "own_generation"
        count = len(parts) * self.settings.world_size
        micro_batches = []
        for generation, _, ranks in parts:
            # By identity: == would compare the tensors of two generations element by element.
            index = next(place for place, other in enumerate(generations) if other is generation)
            scores = [self.score(self.model, generation.tokens.of_rows(rows)) for rows in ranks]
            entropy_masks = self._kept_by_entropy([rank_scores.entropies for rank_scores in scores], generation, ranks)
            if is_own_generation:
                # As if all micro-batches of the step were of this generation.
                step_tokens = len(parts) * sum(self._active_tokens(generation, rows) for rows in ranks)
            for rank, rows in enumerate(ranks):
                micro_batches.append(
                    self._micro_batch(
                        generation, index, rank, tuple(rows), scores[rank], entropy_masks[rank], step_tokens, count
                    )
                )
        return micro_batches

    def _active_tokens(self, generation: Generation, rows: Sequence[int]) -> float:
        mask = generation.tokens.loss_mask
        if self.settings.undecided.active_tokens_of == "step":
            return int(mask[list(rows)].sum())
        # The tokens of a generation, spread equally over its rows.
        return int(mask.sum()) * len(rows) / len(mask)

    def _kept_by_entropy(
        self, entropies: Sequence[Tensor], generation: Generation, ranks: Sequence[Sequence[int]]
    ) -> Sequence[Tensor]:
        quantile = self.settings.top_entropy_quantile
        masks = [generation.tokens.loss_mask[list(rows)] for rows in ranks]
        if self.settings.undecided.entropy_threshold_over == "rank":
            return [
                high_entropy_mask(rank_entropies, mask, quantile)
                for rank_entropies, mask in zip(entropies, masks, strict=True)
            ]
        whole = high_entropy_mask(torch.cat(list(entropies)), torch.cat(masks), quantile)
        return whole.split([len(rows) for rows in ranks])

    def _micro_batch(
        self,
        generation: Generation,
        index: int,
        rank: int,
        rows: tuple[int, ...],
        scores: Scores,
        entropy_mask: Tensor,
        step_tokens: float,
        count: int,
    ) -> MicroBatch:
        settings, row_list = self.settings, list(rows)
        mask, old = generation.tokens.loss_mask[row_list], generation.old_logprobs[row_list]
        advantages = generation.advantages.advantages[row_list]
        weights = importance_weights(scores.logprobs, old, mask, settings.importance_sampling_level)
        losses = policy_losses(scores.logprobs, old, advantages, mask, settings)
        near = on_policy_mask(scores.logprobs, old, advantages, mask, settings.off_policy_mask_threshold)
        policy_mask = entropy_mask & near[:, None]
        shares = token_shares(mask, settings, step_tokens=step_tokens, micro_batches=count).to(losses.dtype)
        per_token = torch.where(policy_mask, losses, 0.0)
        kl = None
        if generation.reference_logprobs is not None:
            reference = generation.reference_logprobs[row_list]
            if settings.sync_ref_model and settings.undecided.reference_scored_at == "step":
                with torch.no_grad():
                    reference = self.score(self.reference_model, generation.tokens.of_rows(rows)).logprobs
            kl = kl_estimate(scores.logprobs, reference)
            corrected = kl_estimate(scores.logprobs, reference, weights) if settings.use_bias_correction_kl else kl
            per_token = per_token + settings.beta * torch.where(mask, corrected, 0.0)
        return MicroBatch(
            generation=index,
            rank=rank,
            rows=rows,
            mask=mask,
            logprobs=scores.logprobs,
            entropies=scores.entropies,
            weights=weights,
            high_entropy_mask=entropy_mask,
            policy_mask=policy_mask,
            policy_losses=losses,
            kl=kl,
            shares=shares,
            loss=(shares * per_token).sum(),
            aux_loss=self.aux_loss(generation.tokens.of_rows(rows)),
        )

    def training_metrics(self, batches: Sequence[MicroBatch], generations: Sequence[Generation]) -> dict[str, float]:
        return metrics.training_metrics(batches, generations, self.settings)

    def objective(self, batches: Sequence[MicroBatch]) -> tuple[Tensor, dict[str, Any]]:
        policy_loss = torch.stack([batch.loss for batch in batches]).sum()
        loss, coefficient = policy_loss, self.entropy_coef
        if self.settings.has_entropy_bonus:
            bonus, coefficient = self._entropy_bonus(batches)
            loss = loss - bonus
        fields = {"policy_loss": policy_loss.detach(), "entropy_coef": coefficient}
        return loss + self.weighted_aux_loss(batches), fields

    def evaluation_loss(self, batches: Sequence[MicroBatch]) -> Tensor:
        policy_loss = torch.stack([batch.loss for batch in batches]).sum()
        return policy_loss - self.entropy_bonus(batches) + self.weighted_aux_loss(batches)

    def step_metrics(self, step: GRPOStep) -> dict[str, float]:
        if not self.settings.has_entropy_bonus:
            return {}
        is_used = self.settings.undecided.entropy_coef_logged == "used"
        return {
            "policy_loss": float(step.policy_loss),
            "entropy_coef": step.entropy_coef if is_used else self.entropy_coef,
        }

    def entropy_bonus(self, batches: Sequence[MicroBatch]) -> Tensor | float:
        """What the loss of an evaluation batch is reduced by."""
        if not self.settings.has_entropy_bonus:
            return 0.0
        pairs = [(batch.entropies, batch.high_entropy_mask) for batch in batches]
        return self.entropy_coef * metrics.mean_over_tokens(pairs, self.settings.undecided.entropy_bonus_mean == "step")

    def _entropy_bonus(self, batches: Sequence[MicroBatch]) -> tuple[Tensor, float]:
        """What the loss is reduced by, and the coefficient before it is updated."""
        settings = self.settings
        over_all = settings.undecided.entropy_bonus_mean == "step"
        pairs = [(batch.entropies, batch.high_entropy_mask) for batch in batches]
        entropy = metrics.mean_over_tokens(pairs, over_all)
        applied = coefficient = self.entropy_coef
        if settings.use_adaptive_entropy:
            current = float(entropy.detach())
            applied, self.entropy_coef = entropy_control(current, coefficient, settings)
            if settings.undecided.entropy_control_by == "previous_step":
                # This step applies what the entropy of the step before says; the new coefficient is for the next one.
                known, self.previous_entropy = self.previous_entropy, current
                applied = 0.0 if known is None else entropy_control(known, coefficient, settings)[0]
        return applied * entropy, coefficient
