"""What lasts from one step of a training to the next, and how a step is put together from the other modules."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytest_trlcompat.reference import metrics, optimizer
from pytest_trlcompat.reference._stepping import Stepper, detached
from pytest_trlcompat.reference.experts import load_balancing_loss, router_logits
from pytest_trlcompat.reference.normalisation import token_shares
from pytest_trlcompat.reference.objective import (
    entropy_control,
    high_entropy_mask,
    importance_weights,
    on_policy_mask,
    policy_losses,
)
from pytest_trlcompat.reference.policy import Scores, kl_estimate, score_tokens
from pytest_trlcompat.reference.records import Generation, GRPOStep, MicroBatch, Rollout
from pytest_trlcompat.reference.rewards import advantages_of
from pytest_trlcompat.reference.settings import GRPOSettings
from pytest_trlcompat.reference.tokens import Tokens, tokens_of

__all__ = ["Learner", "Part"]

Part = tuple[Generation, Rollout, Sequence[Sequence[int]]]
"""A micro-batch of all ranks: its generation, where that came from, and the rows of each rank."""


class Learner:
    """A copy of a policy that is trained, with everything that lasts from one step to the next."""

    def __init__(self, model: Any, settings: GRPOSettings, reference_model: Any, padded: bool) -> None:
        self.settings = settings
        self.model = copy.deepcopy(model)
        self.reference_model = copy.deepcopy(model if reference_model is None else reference_model)
        self.score = functools.partial(
            score_tokens,
            temperature=settings.temperature,
            entropy_at_temperature=settings.undecided.entropy_at_temperature,
            padded=padded,
        )
        self.stepper = Stepper(self.model, settings)
        self.tokens = 0
        self.entropy_coef = settings.entropy_coef
        self.previous_entropy: float | None = None
        self.last: Generation | None = None

    def generate(self, rollout: Rollout, num_generations: int, old_model: Any = None) -> Generation:
        settings = self.settings
        rollout.check_groups(num_generations)
        longest = max(map(len, rollout.completions))
        if longest > settings.max_completion_length:
            raise ValueError(
                f"a completion has {longest} tokens, max_completion_length={settings.max_completion_length}"
            )
        tokens = tokens_of(
            rollout.prompts,
            rollout.completions,
            pad_token_id=settings.pad_token_id,
            eos_token_id=settings.eos_token_id,
            mask_truncated_completions=settings.mask_truncated_completions,
            max_prompt_length=settings.max_prompt_length,
            pad_to_multiple_of=settings.pad_to_multiple_of,
            sampled=rollout.sampled,
        )
        with torch.no_grad():
            old = self.score(self.model if old_model is None else old_model, tokens)
            reference = self.score(self.reference_model, tokens) if settings.beta else None
        advantages = advantages_of(
            rollout.reward_tensor(old.logprobs.dtype),
            num_generations,
            weights=settings.reward_weights,
            scale_rewards=settings.scale_rewards,
            aggregation=settings.multi_objective_aggregation,
            std_correction=settings.undecided.std_correction,
            std_epsilon=settings.undecided.std_epsilon,
            no_reward=settings.undecided.no_reward,
        )
        return Generation(tokens, advantages, old.logprobs, None if reference is None else reference.logprobs)

    def forward(self, parts: Sequence[Part]) -> list[MicroBatch]:
        """The micro-batches of a step, with gradients attached."""
        generations = _without_repeats([part[0] for part in parts])
        step_tokens = sum(self._active_tokens(part[0], rows) for part in parts for rows in part[2])
        own = self.settings.undecided.active_tokens_of == "own_generation"
        count = len(parts) * self.settings.world_size
        found = []
        for generation, _, ranks in parts:
            index = next(place for place, one in enumerate(generations) if one is generation)
            scores = [self.score(self.model, generation.tokens.of_rows(rows)) for rows in ranks]
            kept = self._kept_by_entropy([each.entropies for each in scores], generation, ranks)
            if own:
                step_tokens = len(parts) * sum(self._active_tokens(generation, rows) for rows in ranks)
            for rank, rows in enumerate(ranks):
                found.append(
                    self._micro_batch(
                        generation, index, rank, tuple(rows), scores[rank], kept[rank], step_tokens, count
                    )
                )
        return found

    def _active_tokens(self, generation: Generation, rows: Sequence[int]) -> float:
        mask = generation.tokens.loss_mask
        if self.settings.undecided.active_tokens_of == "step":
            return int(mask[list(rows)].sum())
        return int(mask.sum()) * len(rows) / len(mask)

    def _kept_by_entropy(
        self, entropies: Sequence[Tensor], generation: Generation, ranks: Sequence[Sequence[int]]
    ) -> Sequence[Tensor]:
        quantile = self.settings.top_entropy_quantile
        masks = [generation.tokens.loss_mask[list(rows)] for rows in ranks]
        if self.settings.undecided.entropy_threshold_over == "rank":
            return [high_entropy_mask(own, mask, quantile) for own, mask in zip(entropies, masks, strict=True)]
        whole = high_entropy_mask(torch.cat(list(entropies)), torch.cat(masks), quantile)
        return whole.split([len(rows) for rows in ranks])

    def _micro_batch(
        self,
        generation: Generation,
        index: int,
        rank: int,
        rows: tuple[int, ...],
        scores: Scores,
        kept: Tensor,
        step_tokens: float,
        count: int,
    ) -> MicroBatch:
        settings, own = self.settings, list(rows)
        mask, old = generation.tokens.loss_mask[own], generation.old_logprobs[own]
        advantages = generation.advantages.advantages[own]
        weights = importance_weights(scores.logprobs, old, mask, settings.importance_sampling_level)
        losses = policy_losses(scores.logprobs, old, advantages, mask, settings)
        near = on_policy_mask(scores.logprobs, old, advantages, mask, settings.off_policy_mask_threshold)
        policy_mask = kept & near[:, None]
        shares = token_shares(mask, settings, step_tokens=step_tokens, micro_batches=count).to(losses.dtype)
        per_token = torch.where(policy_mask, losses, 0.0)
        kl = None
        if generation.reference_logprobs is not None:
            reference = generation.reference_logprobs[own]
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
            high_entropy_mask=kept,
            policy_mask=policy_mask,
            policy_losses=losses,
            kl=kl,
            shares=shares,
            loss=(shares * per_token).sum(),
            aux_loss=self._aux_loss(generation.tokens.of_rows(rows)) if settings.router_aux_loss_coef else None,
        )

    def _aux_loss(self, tokens: Tokens) -> Tensor:
        return load_balancing_loss(router_logits(self.model, tokens), self.model.config.num_experts_per_tok)

    def step(self, parts: Sequence[Part], *, total: int) -> GRPOStep:
        """One optimizer step of ``total``."""
        settings = self.settings
        batches = self.forward(parts)
        policy_loss = torch.stack([one.loss for one in batches]).sum()
        loss, coefficient = policy_loss, self.entropy_coef
        if settings.has_entropy_bonus:
            bonus, coefficient = self._entropy_bonus(batches)
            loss = loss - bonus
        loss = loss + self.weighted_aux_loss(batches)
        stepped = self.stepper.step(loss, self.stepper.learning_rate(self.stepper.steps, total))
        self._synchronise_reference()
        step = GRPOStep(
            generations=tuple(_without_repeats([part[0] for part in parts])),
            micro_batches=tuple(detached(one) for one in batches),
            policy_loss=policy_loss.detach(),
            entropy_coef=coefficient,
            loss=loss.detach(),
            **vars(stepped),
            logs={},
        )
        return replace(step, logs=self._logs(step, parts, total))

    def weighted_aux_loss(self, batches: Sequence[MicroBatch]) -> Tensor | float:
        """What the loss gets from the experts: each micro-batch of each rank counts once."""
        found = [one.aux_loss for one in batches if one.aux_loss is not None]
        return self.settings.router_aux_loss_coef * torch.stack(found).mean() if found else 0.0

    def entropy_bonus(self, batches: Sequence[MicroBatch]) -> Tensor | float:
        """What the loss of an evaluation batch is reduced by."""
        if not self.settings.has_entropy_bonus:
            return 0.0
        pairs = [(one.entropies, one.high_entropy_mask) for one in batches]
        return self.entropy_coef * metrics.mean_over_tokens(pairs, self.settings.undecided.entropy_bonus_mean == "step")

    def _entropy_bonus(self, batches: Sequence[MicroBatch]) -> tuple[Tensor, float]:
        """What the loss is reduced by, and the coefficient before it is updated."""
        settings = self.settings
        over_all = settings.undecided.entropy_bonus_mean == "step"
        pairs = [(one.entropies, one.high_entropy_mask) for one in batches]
        entropy = metrics.mean_over_tokens(pairs, over_all)
        applied = coefficient = self.entropy_coef
        if settings.use_adaptive_entropy:
            current = float(entropy.detach())
            applied, self.entropy_coef = entropy_control(current, coefficient, settings)
            if settings.undecided.entropy_control_by == "previous_step":
                known, self.previous_entropy = self.previous_entropy, current
                applied = 0.0 if known is None else entropy_control(known, coefficient, settings)[0]
        return applied * entropy, coefficient

    def _synchronise_reference(self) -> None:
        settings = self.settings
        if not settings.sync_ref_model or self.stepper.steps % settings.ref_model_sync_steps:
            return
        policy, reference = dict(self.model.named_parameters()), dict(self.reference_model.named_parameters())
        with torch.no_grad():
            mixed = optimizer.mix_weights(policy, reference, settings.ref_model_mixup_alpha)
            for name, parameter in reference.items():
                parameter.copy_(mixed[name])

    def _logs(self, step: GRPOStep, parts: Sequence[Part], total: int) -> dict[str, float]:
        settings, found = self.settings, []
        rollouts = {id(generation): rollout for generation, rollout, _ in parts}
        for generation in step.generations:
            if generation is not self.last:
                self.last = generation
                found.append(metrics.generation_metrics(generation, rollouts[id(generation)].names, settings))
                if not settings.undecided.num_tokens_each_iteration:
                    self.tokens += generation.tokens.count()
        if settings.undecided.num_tokens_each_iteration:
            self.tokens += sum(part[0].tokens.of_rows(rows).count() for part in parts for rows in part[2])
        of_next = settings.undecided.learning_rate_logged == "next"
        logs = {
            "loss": float(step.loss),
            "grad_norm": float(step.grad_norm),
            "learning_rate": self.stepper.learning_rate(self.stepper.steps, total) if of_next else step.learning_rate,
            "num_tokens": float(self.tokens),
            **metrics.average_logs(found),
            **metrics.training_metrics(step.micro_batches, step.generations, settings),
        }
        if settings.has_entropy_bonus:
            is_used = settings.undecided.entropy_coef_logged == "used"
            logs["policy_loss"] = float(step.policy_loss)
            logs["entropy_coef"] = step.entropy_coef if is_used else self.entropy_coef
        return logs


def _without_repeats(generations: Sequence[Generation]) -> list[Generation]:
    return list({id(one): one for one in generations}.values())
