"""A recorded training on the rows of a dataset, held against what the reference gives.

Runs inside a rank; imports the stack only inside functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pytest_trlcompat.conformance import comparison
from pytest_trlcompat.conformance.conventions import Conventions
from pytest_trlcompat.conformance.supervised import quantities, truth
from pytest_trlcompat.conformance.supervised.quantities import Expected
from pytest_trlcompat.conformance.supervised.records import Recording
from pytest_trlcompat.conformance.supervised.room import Room

if TYPE_CHECKING:
    import torch

__all__ = ["held"]


def held(
    recordings: Sequence[Recording],
    room: Room,
    models: tuple[torch.nn.Module, ...],
    conventions: Conventions,
    expected: Expected,
    beside: Iterable[comparison.Difference] = (),
) -> comparison.Held:
    """Every quantity that differs, the first one first; each micro-batch whose rows were compared counts as one.

    Args:
        recordings: of all ranks.
        models: of :meth:`~pytest_trlcompat.conformance.supervised.room.Room.models`.
        conventions: how the trainer does what documentation leaves open.
        expected: the rows that the datasets must become.
        beside: what differs before a model has computed anything, and is of no row.

    Raises:
        OutOfStep: ranks had unequal numbers of micro-batches, or there was no step.
        Unsteady: rounding changes the first step so much that nothing can be told.
    """
    import transformers

    def computed(models: tuple[torch.nn.Module, ...]) -> truth.Truth:
        return truth.computed(recordings, room, models, conventions)

    found = quantities.differences(
        recordings,
        computed(models),
        lambda: [computed(each) for each in comparison.neighbours(*models)],
        int(transformers.__version__.partition(".")[0]),
        expected,
        room.only_in_training,
        room.compared,
        beside,
        conventions.unrecorded_with(recordings[0].arguments),
    )
    return found._replace(compared=found.compared + sum(len(one.micro_batches) for one in recordings))
