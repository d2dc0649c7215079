"""Group Relative Policy Optimization: one step, a training, and an evaluation, put together from the other modules."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from pytest_trlcompat.reference import metrics
from pytest_trlcompat.reference._learner import Learner
from pytest_trlcompat.reference.records import (
    Evaluation,
    Generation,
    GRPOStep,
    Layout,
    Rollout,
    check_layout,
    contiguous_layout,
)
from pytest_trlcompat.reference.settings import GRPOSettings

__all__ = ["grpo_evaluate", "grpo_step", "grpo_train"]


def grpo_step(
    model: Any,
    rollout: Rollout,
    settings: GRPOSettings,
    *,
    reference_model: Any = None,
    old_model: Any = None,
    layout: Layout | None = None,
    padded: bool = False,
) -> GRPOStep:
    """The first optimizer step of a training, over all completions of a rollout.

    Args:
        model: the policy, a ``torch.nn.Module`` without dropout, see
            :func:`~pytest_trlcompat.reference.score_tokens`; it stays as it is.
        rollout: completions of all ranks, with their rewards.
        reference_model: where ``beta`` is not 0; the policy itself by default.
        old_model: the policy that sampled; the policy itself by default, as for ``num_iterations=1`` with
            ``steps_per_generation=gradient_accumulation_steps``.
        layout: rows of each micro-batch and rank; by default :func:`~pytest_trlcompat.reference.contiguous_layout`
            over ``gradient_accumulation_steps`` and ``world_size``.
        padded: whether the models see whole padded batches instead of one row after the other.

    Returns:
        Everything that the step makes, without gradients attached.

    Raises:
        ValueError: for rows that are no whole groups or that ranks cannot share, and as the functions of this package.
    """
    learner = Learner(model, settings, reference_model, padded)
    generation = learner.generate(rollout, settings.num_generations, old_model)
    if layout is None:
        layout = contiguous_layout(
            len(rollout.prompts), world_size=settings.world_size, micro_batches=settings.gradient_accumulation_steps
        )
    check_layout(layout, len(rollout.prompts), settings)
    return learner.step([(generation, rollout, ranks) for ranks in layout], total=settings.max_steps or 1)


def grpo_train(
    model: Any,
    rollouts: Sequence[Rollout],
    settings: GRPOSettings,
    *,
    reference_model: Any = None,
    layouts: Sequence[Layout] | None = None,
    padded: bool = False,
) -> tuple[GRPOStep, ...]:
    """A training on completions that are given.

    Each rollout is scored by the policy and the reference model as they are when it is its turn, is split into
    ``steps_per_generation`` micro-batches on each rank, and is gone through ``num_iterations`` times. Every
    ``gradient_accumulation_steps`` micro-batches are one optimizer step.

    Undecided by the documentation: the order of micro-batches and iterations. Each iteration goes through all
    micro-batches, as algorithm 1 of DeepSeekMath does.

    Args:
        model, reference_model, padded: as for :func:`grpo_step`; the reference model is the untrained policy by
            default, and follows it with ``sync_ref_model``. Both stay as they are.
        layouts: of each rollout, over ``steps_per_generation`` micro-batches.

    Returns:
        Its optimizer steps.

    Raises:
        ValueError: as :func:`grpo_step`, and if the micro-batches are no whole number of optimizer steps.
    """
    micro_batches = settings.micro_batches_per_generation
    if layouts is None:
        layouts = [
            contiguous_layout(len(each.prompts), world_size=settings.world_size, micro_batches=micro_batches)
            for each in rollouts
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
    learner = Learner(model, settings, reference_model, padded)
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


def grpo_evaluate(
    model: Any,
    rollouts: Sequence[Rollout],
    settings: GRPOSettings,
    *,
    reference_model: Any = None,
    padded: bool = False,
) -> Evaluation:
    """An evaluation: the loss and the metrics of training, on completions that the model has just sampled.

    The entropy bonus has ``entropy_coef``, also where a training would have changed it. Nothing is accumulated, so that
    ``dapo`` divides by the tokens of one batch over all ranks. Undecided by the documentation: the mean over batches;
    losses are weighted by the completions of each batch, metrics count each batch once; and whether ``num_tokens`` goes
    on counting, which is left out.

    Args:
        model, reference_model, padded: as for :func:`grpo_step`.
        rollouts: one for each evaluation batch over all ranks, in groups of ``num_generations_eval``.

    Raises:
        ValueError: for no rollout, and as :func:`grpo_step`.
    """
    if not rollouts:
        raise ValueError("there is nothing to evaluate")
    learner = Learner(model, settings, reference_model, padded)
    size = settings.num_generations_eval or settings.num_generations
    generations, found, losses, logs = [], [], [], []
    for index, rollout in enumerate(rollouts):
        generation = learner.generate(rollout, size)
        layout = contiguous_layout(len(rollout.prompts), world_size=settings.world_size, micro_batches=1)
        with torch.no_grad():
            batches = learner.forward([(generation, rollout, layout[0])])
        generations.append(generation)
        policy_loss = torch.stack([one.loss for one in batches]).sum()
        losses.append(policy_loss - learner.entropy_bonus(batches) + learner.weighted_aux_loss(batches))
        entry = metrics.generation_metrics(generation, rollout.names, settings, evaluation=True)
        logs.append(entry | metrics.training_metrics(batches, [generation], settings))
        found += [replace(one, generation=index) for one in batches]
    weights = torch.tensor([float(len(each.prompts)) for each in rollouts], dtype=losses[0].dtype)
    entry = {"loss": float((torch.stack(losses) * weights).sum() / weights.sum()), **metrics.average_logs(logs)}
    named = {f"eval_{name}": value for name, value in entry.items()}
    return Evaluation(tuple(generations), tuple(found), torch.stack(losses), named)
