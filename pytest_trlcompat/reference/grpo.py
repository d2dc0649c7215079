"""Group Relative Policy Optimization: one step, a training, and an evaluation, put together from the other modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_trlcompat.reference._learner import Learner
from pytest_trlcompat.reference._sampling import evaluated, stepped, trained
from pytest_trlcompat.reference.records import Evaluation, GRPOStep, Layout, Rollout
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
        padded: whether the models see rows with padding in front, as in a batch of a trainer.

    Returns:
        Everything that the step makes, without gradients attached.

    Raises:
        ValueError: for rows that are no whole groups or that ranks cannot share, and as the functions of this package.
    """
    return stepped(Learner(model, settings, reference_model, padded), rollout, layout, old_model)


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
    return trained(Learner(model, settings, reference_model, padded), rollouts, layouts)


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
    return evaluated(Learner(model, settings, reference_model, padded), rollouts)
