"""Outcome-supervised reward modelling: the Bradley-Terry loss of pairs of sequences, and what is logged of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pytest_trlcompat.reference._together import widened
from pytest_trlcompat.reference.settings import check_choices
from pytest_trlcompat.reference.supervised import Batch, Measured, Objective, SupervisedSettings, SupervisedUndecided

__all__ = ["RewardSettings", "RewardUndecided", "preference_losses", "reward_objective", "sequence_rewards"]

_CHOICES: dict[str, tuple[object, ...]] = {
    "extremes_over": ("ranks", "rank"),
    "appended_eos": ("no", "missing", "yes"),
    "too_long": ("left_out", "kept"),
}


@dataclass(frozen=True, kw_only=True)
class RewardUndecided(SupervisedUndecided):
    """What documentation leaves open for reward models; each default is the simplest reading.

    Attributes:
        extremes_over: the smallest and the largest reward of a micro-batch: over all ``"ranks"``, or the mean of those
            of each ``"rank"``.
        appended_eos: whether an end of sequence is put behind a text: ``"no"``, where it is ``"missing"``, or always.
        too_long: whether pairs with a sequence beyond ``max_length`` are ``"left_out"``, as is documented from 0.15 on,
            or ``"kept"`` as they are: "maximum length of the sequences in the batch".
    """

    extremes_over: str = "ranks"
    appended_eos: str = "no"
    too_long: str = "left_out"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, _CHOICES)


@dataclass(frozen=True, kw_only=True)
class RewardSettings(SupervisedSettings):
    """The arguments of ``RewardConfig`` and ``TrainingArguments`` that decide what a step gives.

    Source: https://huggingface.co/docs/trl/reward_trainer.

    Attributes:
        center_rewards_coefficient: weight of the squared sum of both rewards of a pair; ``None``: 0.
    """

    center_rewards_coefficient: float | None = None
    undecided: RewardUndecided = field(default_factory=RewardUndecided)


def sequence_rewards(model: Any, sequences: Sequence[Sequence[int]]) -> Tensor:
    """The model's number for each sequence: ``(R,)``.

    A reward is defined by the tokens of its sequence, whatever else is in the batch. Hence each goes through the model
    alone and without padding.

    Args:
        model: called with ``input_ids`` and ``attention_mask``, both ``(1, tokens)``; returns one number, or one for
            each token, of which the last is taken, or an object that has them as ``logits``.
        sequences: token ids.

    Raises:
        ValueError: for another number of numbers.
    """
    rewards = []
    for ids in sequences:
        row = torch.tensor([[int(token) for token in ids]], device=next(model.parameters()).device)
        output = model(input_ids=row, attention_mask=torch.ones_like(row))
        numbers = widened(getattr(output, "logits", output).cpu()).flatten()
        if len(numbers) not in (1, len(ids)):
            raise ValueError(f"{type(model).__name__} gives {len(numbers)} numbers for a sequence of {len(ids)} tokens")
        rewards.append(numbers[-1])
    return torch.stack(rewards)


def preference_losses(
    chosen: Tensor, rejected: Tensor, *, margins: Tensor | None = None, center_rewards_coefficient: float | None = None
) -> Tensor:
    """``-log sigmoid(r+ - r- - m) + c (r+ + r-)^2`` of each pair: ``(R,)``.

    Source: Bradley and Terry; for the margin ``m`` Llama 2, equation 2; for the coefficient ``c`` Eisenstein et al.,
    equation 2 (https://huggingface.co/papers/2312.09244).

    Args:
        chosen, rejected: ``(R,)``, rewards.
        margins: ``(R,)``; none: 0.
    """
    apart = chosen - rejected if margins is None else chosen - rejected - margins
    losses = -torch.nn.functional.logsigmoid(apart)
    if center_rewards_coefficient:
        losses = losses + center_rewards_coefficient * (chosen + rejected) ** 2
    return losses


def reward_objective(settings: RewardSettings) -> Objective:
    """The loss of batches of pairs: the mean over the pairs of a micro-batch, and over micro-batches and ranks.

    A row has the columns ``chosen_ids`` and ``rejected_ids``, and, where it has a margin, ``margin``, one number.

    Logged in addition to the loss (https://huggingface.co/docs/trl/reward_trainer#logged-metrics):

    - ``accuracy``: the part of the pairs whose chosen sequence has the higher reward.
    - ``min_reward``, ``max_reward``: of a micro-batch, "averaged over the logging interval".
    - ``mean_reward``: over chosen and rejected sequences; ``margin``: mean of ``r+ - r-``.
    - ``num_tokens``: of all sequences so far.

    Undecided by the documentation: ``extremes_over``, see :class:`RewardUndecided`.
    """

    def objective(model: Any, batches: Sequence[Sequence[Batch]]) -> list[Measured]:
        count = sum(map(len, batches))
        measured = []
        for ranks in batches:
            rewards = [
                tuple(sequence_rewards(model, [row[name] for row in batch]) for name in ("chosen_ids", "rejected_ids"))
                for batch in ranks
            ]
            together = [torch.cat(pair).detach() for pair in rewards]
            everywhere = torch.cat(together)
            for batch, (chosen, rejected), rank_rewards in zip(ranks, rewards, together, strict=True):
                extremes = everywhere if settings.undecided.extremes_over == "ranks" else rank_rewards
                losses = preference_losses(
                    chosen,
                    rejected,
                    margins=_margins(batch, chosen),
                    center_rewards_coefficient=settings.center_rewards_coefficient,
                )
                measured.append(_measured(batch, chosen, rejected, losses, extremes, count))
        return measured

    return objective


def _margins(batch: Sequence[Mapping[str, Sequence[float]]], like: Tensor) -> Tensor | None:
    if not all("margin" in row for row in batch):
        return None
    return like.new_tensor([row["margin"][0] for row in batch])


def _measured(batch: Batch, chosen: Tensor, rejected: Tensor, losses: Tensor, extremes: Tensor, count: int) -> Measured:
    apart, size = (chosen - rejected).detach(), len(batch)
    rewards = torch.cat([chosen, rejected]).detach()
    take: Mapping[str, Callable[[Tensor], Tensor]] = {"min_reward": torch.min, "max_reward": torch.max}
    return Measured(
        losses.mean() / count,
        alone=losses.mean(),
        metrics={
            "accuracy": (float((apart > 0).sum()), size),
            "mean_reward": (float(rewards.sum()), 2 * size),
            "margin": (float(apart.sum()), size),
            **{name: (float(of(extremes)), 1) for name, of in take.items()},
        },
        counted={"num_tokens": float(sum(len(row[name]) for row in batch for name in ("chosen_ids", "rejected_ids")))},
    )
