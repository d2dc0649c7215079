"""Compare a recorded training on the rows of a dataset with the reference.

Runs inside a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pytest_trlcompat.conformance import comparison
from pytest_trlcompat.conformance.conventions import Conventions
from pytest_trlcompat.conformance.supervised import expected, quantities
from pytest_trlcompat.conformance.supervised.hooks import SupervisedHooks
from pytest_trlcompat.conformance.supervised.quantities import ExpectedRows
from pytest_trlcompat.conformance.supervised.records import Recording

if TYPE_CHECKING:
    import torch

__all__ = ["compare_with_reference"]


def compare_with_reference(
    recordings: Sequence[Recording],
    adapter: SupervisedHooks,
    models: tuple[torch.nn.Module, ...],
    conventions: Conventions,
    expected_rows: ExpectedRows,
    extra_differences: Iterable[comparison.Difference] = (),
) -> comparison.Comparison:
    """Every quantity that differs, the first one first; each micro-batch whose rows were compared counts as one.

    Args:
        recordings: of all ranks.
        models: of :meth:`~pytest_trlcompat.conformance.supervised.hooks.SupervisedHooks.models`.
        conventions: how the trainer does what documentation leaves open.
        expected_rows: the rows that the datasets must become.
        extra_differences: what differs before a model has computed anything, and belongs to no row.

    Raises:
        StepCountMismatch: ranks had unequal numbers of micro-batches, or there was no step.
        ToleranceUnknown: rounding changes the first step so much that no difference could be told from it.
    """
    import transformers

    def computed(models: tuple[torch.nn.Module, ...]) -> expected.ExpectedTraining:
        return expected.computed(recordings, adapter, models, conventions)

    def neighbours() -> list[expected.ExpectedTraining]:
        return [computed(changed) for changed in comparison.neighbours(*models)]

    unchanged, major = computed(models), int(transformers.__version__.partition(".")[0])
    unrecorded = conventions.unrecorded_with(recordings[0].arguments)
    result = quantities.compare(
        recordings,
        unchanged,
        neighbours() if quantities.exceeds_floor(recordings, unchanged, major, unrecorded) else [],
        major,
        expected_rows,
        adapter.only_in_training,
        adapter.compared,
        extra_differences,
        unrecorded,
    )
    return result._replace(compared=result.compared + sum(len(recording.micro_batches) for recording in recordings))
