"""Compute with the reference what a recorded training on the rows of a dataset must give, from the same rows.

Runs inside a rank, or wherever torch is.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_trlcompat.conformance.comparison import StepCountMismatch
from pytest_trlcompat.conformance.conventions import Conventions
from pytest_trlcompat.conformance.supervised.hooks import SupervisedHooks
from pytest_trlcompat.conformance.supervised.records import Recording

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat import reference

__all__ = ["ExpectedTraining", "computed", "settings_from"]

Settings = TypeVar("Settings", bound="reference.SupervisedSettings")


@dataclass(frozen=True)
class ExpectedTraining:
    """
    Attributes:
        starts: for each step, how many micro-batches a rank had before it.
        evaluations: in the order of the recording.
    """

    settings: reference.SupervisedSettings
    steps: tuple[reference.SupervisedStep, ...]
    starts: tuple[int, ...]
    evaluations: tuple[reference.SupervisedEvaluation, ...]


def settings_from(
    settings_class: type[Settings],
    undecided_class: type[reference.SupervisedUndecided],
    arguments: Mapping[str, Any],
    conventions: Conventions,
    world_size: int,
    **changed: Any,
) -> Settings:
    """The reference's settings: from the arguments of a trainer and the conventions of its release.

    Args:
        conventions: of the trainer's release.
        changed: settings that the adapter computes itself, in place of an argument.
    """
    names = {field.name for field in fields(settings_class)}
    chosen = dict(conventions.absent)
    chosen |= {name: value for name, value in arguments.items() if name in names}
    for name in ("lr_scheduler_type", "optim"):
        # Transformers makes enumerations of these texts.
        chosen[name] = str(getattr(chosen[name], "value", chosen[name]))
    if not chosen.get("warmup_steps"):
        # The reference has one setting for both: below 1 it is the part of the steps that warmup_ratio names.
        chosen["warmup_steps"] = arguments.get("warmup_ratio") or 0
    # Transformers writes -1 where the number of epochs says how long it trains.
    if chosen.get("max_steps", -1) < 0:
        chosen["max_steps"] = None
    undecided = undecided_class(**conventions.undecided)
    return settings_class(**{**chosen, "world_size": world_size, "undecided": undecided, **changed})


def computed(
    recordings: Sequence[Recording],
    adapter: SupervisedHooks,
    models: tuple[torch.nn.Module, ...],
    conventions: Conventions,
) -> ExpectedTraining:
    """
    Args:
        recordings: of all ranks.
        models: of :meth:`~pytest_trlcompat.conformance.supervised.hooks.SupervisedHooks.models`.

    Raises:
        StepCountMismatch: ranks had unequal numbers of micro-batches, or there was no step.
    """
    from pytest_trlcompat import reference

    # after_step may mix the policy into the reference model in place, and neighbours are made of the untrained ones.
    models = copy.deepcopy(models)
    settings = adapter.settings(recordings[0].arguments, conventions, len(recordings), models)
    counts = {tuple(step.micro_batches for step in recording.steps) for recording in recordings}
    if len(counts) != 1 or not recordings[0].steps:
        raise StepCountMismatch(f"until each step, ranks had {sorted(counts)} micro-batches")
    ends = next(iter(counts))
    starts = (0, *ends[:-1])
    training = [recording.training for recording in recordings]
    batches = [
        [[rank[number].rows for rank in training] for number in range(start, end)]
        for start, end in zip(starts, ends, strict=True)
    ]
    if not all(batches):
        raise StepCountMismatch(f"a step had no micro-batch; until each step there were {ends}")
    objective, after_step = adapter.objective(models, settings), adapter.after_step(models, settings)
    evaluated: dict[int, reference.SupervisedEvaluation] = {}

    def evaluations_after(policy: Any, steps_made: int) -> None:
        for number, (after, _) in enumerate(recordings[0].evaluations):
            if after == steps_made:
                evaluated[number] = reference.supervised_evaluate(
                    policy, _evaluation_batches(recordings, number), settings, objective
                )

    def step_made(policy: Any, steps_made: int) -> None:
        if after_step is not None:
            after_step(policy, steps_made)
        evaluations_after(policy, steps_made)

    evaluations_after(models[0], 0)
    steps = reference.supervised_train(models[0], batches, settings, objective, after_step=step_made)
    return ExpectedTraining(settings, steps, starts, tuple(evaluated[number] for number in sorted(evaluated)))


def _evaluation_batches(recordings: Sequence[Recording], number: int) -> list[list[Any]]:
    by_rank = [
        [batch.rows for batch in recording.micro_batches if batch.evaluation == number] for recording in recordings
    ]
    if len({len(batches) for batches in by_rank}) != 1 or not by_rank[0]:
        raise StepCountMismatch(f"in evaluation {number} ranks had {[*map(len, by_rank)]} batches")
    return [list(ranks) for ranks in zip(*by_rank, strict=True)]
