"""What a training on batches that are given must do: the part that SFT, DPO, KTO, reward models and distillation share.

A trainer's own part is an :data:`Objective`: from the batches of an optimizer step it makes one :class:`Measured` each.
This module adds their shares of the loss up, over micro-batches and ranks, takes gradients, clips and steps, and says
what is logged and what an evaluation returns::

    from pytest_trlcompat import reference

    def objective(model, batches):  # batches[micro_batch][rank]
        found = []
        for ranks in batches:
            for batch in ranks:
                losses = ...  # of each row of the batch
                share = 1 / (len(batches) * len(ranks))
                metrics = {"margins": (margins.sum(), len(batch))}
                found.append(reference.Measured(losses.mean() * share, metrics=metrics))
        return found

    settings = reference.SupervisedSettings(optim="sgd", learning_rate=0.1, world_size=2)
    steps = reference.supervised_train(model, [[[rows, rows]]], settings, objective)

An objective itself holds what it needs in addition to the policy, such as a reference model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pytest_trlcompat.reference._stepping import Stepped, Stepper
from pytest_trlcompat.reference.metrics import average_logs
from pytest_trlcompat.reference.settings import OptimizerSettings, check_choices

__all__ = [
    "Batch",
    "Measured",
    "Objective",
    "SupervisedEvaluation",
    "SupervisedSettings",
    "SupervisedStep",
    "SupervisedUndecided",
    "supervised_evaluate",
    "supervised_logs",
    "supervised_train",
]

Batch = Sequence[Any]
"""The rows of a micro-batch on one rank, in whatever form the objective understands."""

_CHOICES: dict[str, tuple[object, ...]] = {
    "learning_rate_logged": ("used", "next"),
    "metrics_mean": ("tokens", "micro_batches", "ranks"),
    "evaluation_mean": ("rows", "batches"),
}


@dataclass(frozen=True)
class Measured:
    """What a micro-batch on one rank gives.

    Attributes:
        loss: a scalar with its graph: its share of the step's loss, which is the sum of all shares.
        alone: the loss of the batch by itself, which an evaluation takes the mean of; ``None``: equal shares, so that
            it is ``loss`` times the number of batches that were measured together.
        values: numbers of the micro-batch to compare, by quantity: of tokens ``(R, T)``, or of rows ``(R,)``.
        masks: of those of tokens, which count.
        metrics: what is logged as a mean, by name: a sum and what it is divided by; left out where that is 0.
        differences: what is logged as the first less the second of two such means, by name; left out without both.
        counted: what is logged as a running sum since the start, by name.
        together: what is logged of all batches that were measured together, and is the same in each of them: of a step,
            or of a batch of an evaluation on all ranks; of several of these the mean.
    """

    loss: Tensor
    alone: Tensor | None = None
    values: Mapping[str, Tensor] = field(default_factory=dict)
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, tuple[Tensor | float, float]] = field(default_factory=dict)
    counted: Mapping[str, float] = field(default_factory=dict)
    differences: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    together: Mapping[str, float] = field(default_factory=dict)


Objective = Callable[[Any, Sequence[Sequence[Batch]]], "list[Measured]"]
"""Called with the policy and all batches of a step, ``batches[micro_batch][rank]``; one result each, in this order."""


@dataclass(frozen=True, kw_only=True)
class SupervisedUndecided:
    """What documentation leaves open for every such trainer; each default is the simplest reading.

    Attributes:
        learning_rate_logged: that which the step ``"used"``, or the ``"next"`` one's.
        metrics_mean: a metric is a mean over everything that was counted since the last line (``"tokens"``), or the
            mean over ``"micro_batches"`` of means over all ranks, or the mean of the means of single ``"ranks"``.
        evaluation_mean: the loss of an evaluation: each batch counts as often as it has ``"rows"``, or
            ``"batches"`` count equally.
    """

    learning_rate_logged: str = "used"
    metrics_mean: str = "tokens"
    evaluation_mean: str = "rows"

    def __post_init__(self) -> None:
        check_choices(self, _CHOICES)


@dataclass(frozen=True, kw_only=True)
class SupervisedSettings(OptimizerSettings):
    """The arguments of the optimizer, and what the simulation of ranks needs. A trainer's own settings derive from it.

    Attributes:
        world_size: how many ranks share the rows; they are simulated.
        max_steps: of the whole training, for the learning rate's schedule; ``None``: the steps that are run.
        undecided: what the documentation leaves open.
    """

    world_size: int = 1
    max_steps: int | None = None
    undecided: SupervisedUndecided = field(default_factory=SupervisedUndecided)


@dataclass(frozen=True)
class SupervisedStep(Stepped):
    """An optimizer step.

    Attributes:
        loss: of all micro-batches and ranks.
        micro_batches: what each gave, without graphs, by time, then by rank.
        next_learning_rate: of the step after it.
    """

    loss: float
    micro_batches: tuple[Measured, ...]
    next_learning_rate: float


@dataclass(frozen=True)
class SupervisedEvaluation:
    """
    Attributes:
        logs: ``eval_loss`` and each metric with ``eval_`` before its name.
        micro_batches: what each gave, by time, then by rank.
    """

    logs: dict[str, float]
    micro_batches: tuple[Measured, ...]


def supervised_train(
    model: Any, steps: Sequence[Sequence[Sequence[Batch]]], settings: SupervisedSettings, objective: Objective
) -> tuple[SupervisedStep, ...]:
    """All of :func:`supervised_steps`."""
    return tuple(step for _, step in supervised_steps(model, steps, settings, objective))


def supervised_steps(
    model: Any, steps: Sequence[Sequence[Sequence[Batch]]], settings: SupervisedSettings, objective: Objective
) -> Iterator[tuple[Any, SupervisedStep]]:
    """Train a copy of the model, and yield after each step the policy as it then is, and the step.

    What changes between steps in addition, such as a reference model, is changed before the next one is asked for.

    Args:
        steps: the batches of each optimizer step, ``steps[step][micro_batch][rank]``.

    Raises:
        ValueError: for a number of ranks that is not ``world_size``, and for an objective that leaves batches out.
    """
    model = copy.deepcopy(model)
    stepper = Stepper(model, settings)
    total = settings.max_steps or len(steps)
    for number, batches in enumerate(steps):
        if any(len(ranks) != settings.world_size for ranks in batches):
            raise ValueError(f"step {number} has {[*map(len, batches)]} ranks, and world_size={settings.world_size}")
        measured = _measured(objective, model, batches)
        loss = torch.stack([batch.loss for batch in measured]).sum()
        stepped = stepper.step(loss, stepper.learning_rate(number, total))
        after = stepper.learning_rate(number + 1, total)
        step = SupervisedStep(
            **vars(stepped), loss=float(loss.detach()), micro_batches=measured, next_learning_rate=after
        )
        yield model, _without_graphs(step)


def supervised_logs(
    steps: Sequence[SupervisedStep], settings: SupervisedSettings, before: Sequence[SupervisedStep] = ()
) -> dict[str, float]:
    """What is logged after steps: the mean loss, of the last step the norm of gradients and the learning rate, metrics.

    Args:
        steps: those since the last line.
        before: those until then, for what is counted from the start.
    """
    last = steps[-1]
    is_next = settings.undecided.learning_rate_logged == "next"
    logs = {
        "loss": sum(step.loss for step in steps) / len(steps),
        "grad_norm": float(last.grad_norm),
        "learning_rate": last.next_learning_rate if is_next else last.learning_rate,
    }
    logs |= _metrics([batch for step in steps for batch in step.micro_batches], settings)
    logs |= average_logs(step.micro_batches[0].together for step in steps)
    for name in last.micro_batches[0].counted:
        logs[name] = sum(batch.counted[name] for step in [*before, *steps] for batch in step.micro_batches)
    return logs


def supervised_evaluate(
    model: Any, batches: Sequence[Sequence[Batch]], settings: SupervisedSettings, objective: Objective
) -> SupervisedEvaluation:
    """What an evaluation gives: each batch by itself, ``batches[batch][rank]``, none accumulated."""
    micro_batches: list[Measured] = []
    losses: list[tuple[float, int]] = []
    logged = []
    with torch.no_grad():
        for ranks in batches:
            together = _measured(objective, model, [ranks])
            for batch, measured in zip(ranks, together, strict=True):
                # ``loss`` is the batch's part of a mean over the ranks; in an evaluation each batch stands for itself.
                alone = measured.loss * len(together) if measured.alone is None else measured.alone
                weight = len(batch) if settings.undecided.evaluation_mean == "rows" else 1
                losses.append((float(alone), weight))
            micro_batches += together
            logged.append(together[0].together)
    loss = sum(value * weight for value, weight in losses) / sum(weight for _, weight in losses)
    entry = {**_metrics(micro_batches, settings), **average_logs(logged)}
    metrics = {f"eval_{name}": value for name, value in entry.items()}
    return SupervisedEvaluation({"eval_loss": loss, **metrics}, tuple(micro_batches))


def _measured(objective: Objective, model: Any, batches: Sequence[Sequence[Batch]]) -> tuple[Measured, ...]:
    measured = tuple(objective(model, batches))
    count = sum(map(len, batches))
    if len(measured) != count:
        raise ValueError(f"the objective gave {len(measured)} results for {count} batches")
    return measured


def _metrics(micro_batches: Sequence[Measured], settings: SupervisedSettings) -> dict[str, float]:
    """Means by ``metrics_mean``; of a metric that nothing was counted for, none."""
    way, ranks = settings.undecided.metrics_mean, settings.world_size
    # By time, then by rank: so many neighbours are counted as one.
    size = {"tokens": len(micro_batches), "micro_batches": ranks, "ranks": 1}[way]
    names = {name: None for batch in micro_batches for name in batch.metrics}
    means_by_name = {}
    for name in names:
        pairs = [batch.metrics.get(name, (0.0, 0.0)) for batch in micro_batches]
        means = []
        for start in range(0, len(pairs), size):
            part = pairs[start : start + size]
            count = sum(count for _, count in part)
            if count:
                means.append(sum(float(total) for total, _ in part) / count)
        if means:
            means_by_name[name] = sum(means) / len(means)
    for name, (first, other) in micro_batches[0].differences.items():
        if first in means_by_name and other in means_by_name:
            means_by_name[name] = means_by_name[first] - means_by_name[other]
    return means_by_name


def _without_graphs(step: SupervisedStep) -> SupervisedStep:
    detached = []
    for batch in step.micro_batches:
        metrics = {name: (float(total), count) for name, (total, count) in batch.metrics.items()}
        values = {name: tensor.detach() for name, tensor in batch.values.items()}
        alone = None if batch.alone is None else batch.alone.detach()
        logged = batch.masks, metrics, batch.counted, batch.differences, batch.together
        detached.append(Measured(batch.loss.detach(), alone, values, *logged))
    return SupervisedStep(**{**vars(step), "micro_batches": tuple(detached)})
