"""What trainers that train on sampled completions have in common: from a rollout to an optimizer step and its logs."""

from __future__ import annotations

import copy
import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from pytest_trlcompat.reference import metrics, optimizer
from pytest_trlcompat.reference._stepping import Stepper, detached
from pytest_trlcompat.reference.experts import load_balancing_loss, router_logits
from pytest_trlcompat.reference.policy import score_tokens
from pytest_trlcompat.reference.records import Evaluation, Generation, Layout, Rollout, check_layout, contiguous_layout
from pytest_trlcompat.reference.rewards import Advantages
from pytest_trlcompat.reference.settings import SamplingSettings
from pytest_trlcompat.reference.tokens import Tokens, tokens_of

__all__ = ["Part", "SamplingLearner", "evaluated", "stepped", "trained"]

Part = tuple[Generation, Rollout, Sequence[Sequence[int]]]
"""A micro-batch of all ranks: its generation, where that came from, and the rows of each rank."""

Settings = TypeVar("Settings", bound=SamplingSettings)
Batch = TypeVar("Batch", bound=Any)
Step = TypeVar("Step", bound=Any)


class SamplingLearner(ABC, Generic[Settings, Batch, Step]):
    """A copy of a policy that is trained, with everything that lasts from one step to the next."""

    step_record: ClassVar[type]

    def __init__(self, model: Any, settings: Settings, reference_model: Any, padded: bool) -> None:
        self.settings = settings
        self.model = copy.deepcopy(model)
        # A copy as well, since sync_ref_model changes it.
        self.reference_model = copy.deepcopy(model if reference_model is None else reference_model)
        self.score = functools.partial(
            score_tokens,
            temperature=settings.temperature,
            entropy_at_temperature=settings.undecided.entropy_at_temperature,
            padded=padded,
        )
        self.stepper = Stepper(self.model, settings)
        self.tokens = 0
        self.last: Generation | None = None

    @abstractmethod
    def advantages(
        self,
        rollout: Rollout,
        num_generations: int,
        tokens: Tokens,
        old_logprobs: Tensor,
        reference_logprobs: Tensor | None,
    ) -> Advantages:
        """Of the completions of a rollout, over all ranks; log-probabilities are ``(R, C)``."""

    @abstractmethod
    def forward(self, parts: Sequence[Part]) -> list[Batch]:
        """The micro-batches of a step, by time, then by rank, with gradients attached."""

    @abstractmethod
    def training_metrics(self, batches: Sequence[Batch], generations: Sequence[Generation]) -> dict[str, float]:
        """What is logged of tokens that are trained on, all micro-batches and ranks together."""

    def objective(self, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Any]]:
        """The loss of a training step, and further fields of its record."""
        return torch.stack([batch.loss for batch in batches]).sum() + self.weighted_aux_loss(batches), {}

    def evaluation_loss(self, batches: Sequence[Batch]) -> Tensor:
        """The loss of an evaluation batch."""
        return self.objective(batches)[0]

    def generation_metrics(self, generation: Generation, rollout: Rollout, evaluation: bool) -> dict[str, float]:
        """What is logged of completions and rewards, all ranks together."""
        return metrics.generation_metrics(generation, rollout.names, self.settings, evaluation=evaluation)

    def step_metrics(self, step: Step) -> dict[str, float]:
        """What else is logged of a step."""
        return {}

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
            inputs=rollout.inputs,
        )
        with torch.no_grad():
            old = self.score(self.model if old_model is None else old_model, tokens).logprobs
            reference = self.score(self.reference_model, tokens).logprobs if settings.beta else None
        advantages = self.advantages(rollout, num_generations, tokens, old, reference)
        return Generation(tokens, advantages, old, reference)

    def step(self, parts: Sequence[Part], *, total: int) -> Step:
        """One optimizer step of ``total``."""
        batches = self.forward(parts)
        loss, beside = self.objective(batches)
        stepped = self.stepper.step(loss, self.stepper.learning_rate(self.stepper.steps, total))
        self._synchronise_reference()
        step: Step = self.step_record(
            generations=tuple(without_repeats([part[0] for part in parts])),
            micro_batches=tuple(detached(batch) for batch in batches),
            loss=loss.detach(),
            **beside,
            **vars(stepped),
            logs={},
        )
        return replace(step, logs=self._logs(step, parts, total))

    def weighted_aux_loss(self, batches: Sequence[Batch]) -> Tensor | float:
        """What the loss gets from the experts: each micro-batch of each rank counts once."""
        aux_losses = [batch.aux_loss for batch in batches if batch.aux_loss is not None]
        return self.settings.router_aux_loss_coef * torch.stack(aux_losses).mean() if aux_losses else 0.0

    def aux_loss(self, tokens: Tokens) -> Tensor | None:
        """The auxiliary loss of a mixture of experts over rows, prompts included, where it has a weight."""
        if not self.settings.router_aux_loss_coef:
            return None
        return load_balancing_loss(router_logits(self.model, tokens), self.model.config.num_experts_per_tok)

    def _synchronise_reference(self) -> None:
        settings = self.settings
        if not settings.sync_ref_model or self.stepper.steps % settings.ref_model_sync_steps:
            return
        policy, reference = dict(self.model.named_parameters()), dict(self.reference_model.named_parameters())
        with torch.no_grad():
            mixed = optimizer.mix_weights(policy, reference, settings.ref_model_mixup_alpha)
            for name, parameter in reference.items():
                parameter.copy_(mixed[name])

    def _logs(self, step: Step, parts: Sequence[Part], total: int) -> dict[str, float]:
        settings, generation_logs = self.settings, []
        rollouts = {id(generation): rollout for generation, rollout, _ in parts}
        for generation in step.generations:
            # A generation is logged once, in the first step that trains on it.
            if generation is not self.last:
                self.last = generation
                generation_logs.append(self.generation_metrics(generation, rollouts[id(generation)], False))
                if not settings.undecided.num_tokens_each_iteration:
                    self.tokens += generation.tokens.count()
        if settings.undecided.num_tokens_each_iteration:
            self.tokens += sum(part[0].tokens.of_rows(rows).count() for part in parts for rows in part[2])
        of_next = settings.undecided.learning_rate_logged == "next"
        return {
            "loss": float(step.loss),
            "grad_norm": float(step.grad_norm),
            "learning_rate": self.stepper.learning_rate(self.stepper.steps, total) if of_next else step.learning_rate,
            "num_tokens": float(self.tokens),
            **metrics.average_logs(generation_logs),
            **self.training_metrics(step.micro_batches, step.generations),
            **self.step_metrics(step),
        }


def without_repeats(generations: Sequence[Generation]) -> list[Generation]:
    # By identity, in their order: == would compare tensors.
    return list({id(generation): generation for generation in generations}.values())


def stepped(learner: SamplingLearner[Any, Any, Step], rollout: Rollout, layout: Layout | None, old_model: Any) -> Step:
    """The first optimizer step of a training, over all completions of a rollout."""
    settings = learner.settings
    generation = learner.generate(rollout, settings.num_generations, old_model)
    if layout is None:
        layout = contiguous_layout(
            len(rollout.prompts), world_size=settings.world_size, micro_batches=settings.gradient_accumulation_steps
        )
    check_layout(layout, len(rollout.prompts), settings)
    return learner.step([(generation, rollout, ranks) for ranks in layout], total=settings.max_steps or 1)


def trained(
    learner: SamplingLearner[Any, Any, Step], rollouts: Sequence[Rollout], layouts: Sequence[Layout] | None
) -> tuple[Step, ...]:
    """The optimizer steps of a training on completions that are given."""
    settings = learner.settings
    micro_batches = settings.micro_batches_per_generation
    if layouts is None:
        layouts = [
            contiguous_layout(len(rollout.prompts), world_size=settings.world_size, micro_batches=micro_batches)
            for rollout in rollouts
        ]
    for rollout, layout in zip(rollouts, layouts, strict=True):
        check_layout(layout, len(rollout.prompts), settings)
    count, rest = divmod(
        sum(len(layout) for layout in layouts) * settings.num_iterations, settings.gradient_accumulation_steps
    )
    if rest or not count:
        raise ValueError(
            f"{len(rollouts)} rollouts of {micro_batches} micro-batches, {settings.num_iterations} times each, are no "
            f"whole number of steps of {settings.gradient_accumulation_steps}"
        )
    # One generator for the whole training: a step may accumulate micro-batches of two rollouts.
    turns = (
        (rollout, ranks, iteration == 0 and index == 0)
        for rollout, layout in zip(rollouts, layouts, strict=True)
        for iteration in range(settings.num_iterations)
        for index, ranks in enumerate(layout)
    )
    steps = []
    generation: Generation | None = None
    for _ in range(count):
        parts = []
        for rollout, ranks, is_first in itertools.islice(turns, settings.gradient_accumulation_steps):
            if is_first or generation is None:
                generation = learner.generate(rollout, settings.num_generations)
            parts.append((generation, rollout, ranks))
        steps.append(learner.step(parts, total=settings.max_steps or count))
    return tuple(steps)


def evaluated(learner: SamplingLearner[Any, Any, Any], rollouts: Sequence[Rollout]) -> Evaluation:
    """The loss and the metrics of training, on completions that the model has just sampled."""
    if not rollouts:
        raise ValueError("there is nothing to evaluate")
    settings = learner.settings
    size = settings.num_generations_eval or settings.num_generations
    generations: list[Generation] = []
    micro_batches, losses, logs = [], [], []
    for index, rollout in enumerate(rollouts):
        generation = learner.generate(rollout, size)
        layout = contiguous_layout(len(rollout.prompts), world_size=settings.world_size, micro_batches=1)
        with torch.no_grad():
            batches = learner.forward([(generation, rollout, layout[0])])
        generations.append(generation)
        losses.append(learner.evaluation_loss(batches))
        entry = learner.generation_metrics(generation, rollout, True)
        logs.append(entry | learner.training_metrics(batches, [generation]))
        micro_batches += [replace(batch, generation=index) for batch in batches]
    weights = torch.tensor([float(len(rollout.prompts)) for rollout in rollouts], dtype=losses[0].dtype)
    entry = {"loss": float((torch.stack(losses) * weights).sum() / weights.sum()), **metrics.average_logs(logs)}
    named = {f"eval_{name}": value for name, value in entry.items()}
    return Evaluation(tuple(generations), tuple(micro_batches), torch.stack(losses), named)
