"""Compute with the reference what a recorded training on the rows of a dataset must give, from the same rows.

Runs inside a rank, or wherever torch is.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.comparison import StepCountMismatch
from pytest_trlcompat.conformance.conventions import Conventions
from pytest_trlcompat.conformance.supervised.hooks import SupervisedHooks
from pytest_trlcompat.conformance.supervised.records import Recording

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat import reference

__all__ = ["ExpectedTraining", "computed"]


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

    def evaluate(policy: Any, steps_made: int) -> None:
        for number, (after, _) in enumerate(recordings[0].evaluations):
            if after == steps_made:
                evaluated[number] = reference.supervised_evaluate(
                    policy, _evaluation_batches(recordings, number), settings, objective
                )

    evaluate(models[0], 0)
    steps = []
    for policy, step in reference.supervised_steps(models[0], batches, settings, objective):
        steps.append(step)
        if after_step is not None:
            after_step(policy, len(steps))
        evaluate(policy, len(steps))
    return ExpectedTraining(settings, tuple(steps), starts, tuple(evaluated[number] for number in sorted(evaluated)))


def _evaluation_batches(recordings: Sequence[Recording], number: int) -> list[list[Any]]:
    by_rank = [
        [batch.rows for batch in recording.micro_batches if batch.evaluation == number] for recording in recordings
    ]
    if len({len(batches) for batches in by_rank}) != 1 or not by_rank[0]:
        raise StepCountMismatch(f"in evaluation {number} ranks had {[*map(len, by_rank)]} batches")
    return [list(ranks) for ranks in zip(*by_rank, strict=True)]
