"""The records of a conformance training on the rows of a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.step_records import StepRecord

if TYPE_CHECKING:
    import torch

__all__ = ["MicroBatchRecord", "Read", "Recording", "Row"]

Row = Mapping[str, Any]
"""A row as the loss sees it, without padding: tuples of numbers by column, ``{"input_ids": (5, 6, 1), "labels": (-100,
6, 1)}``. A row with images also has the further inputs of the model, as nested lists by name."""


@dataclass
class Read:
    """The contents of a batch of the collator.

    Attributes:
        rows: as the loss sees them.
        problems: of the batch as a whole, and not of a row: the stage, what was expected, and what was there.
        values: numbers that came with the rows and are compared with the reference's, such as log-probabilities that
            were computed before the training; lists with an entry for each row, by quantity.
    """

    rows: list[Row]
    problems: list[tuple[str, Any, Any]] = field(default_factory=list)
    values: dict[str, list[Any]] = field(default_factory=dict)


@dataclass
class MicroBatchRecord(Read):
    """One micro-batch on one rank, as it came to ``compute_loss`` or to ``prediction_step``.

    Attributes:
        evaluation: the number of the evaluation that it belongs to; ``None`` in training.
    """

    evaluation: int | None = None


@dataclass
class Recording:
    """A training on one rank.

    Attributes:
        arguments: fields of the config as the trainer has them.
        sizes: rows of the trainer's datasets, ``training`` and ``evaluation``, where they have a length.
        evaluations: for each evaluation, after how many steps it was, and what it logged.
        returned: what each evaluation returned.
        changed: dictionaries of the user's config that building the trainer changed: before and after.
        fingerprints: of the prepared training sets of two trainers with the same arguments.
        before_resuming: rows of each micro-batch after the checkpoint from which a training was resumed later.
        after_resuming: the same of the resumed training.
        final: trained weights at the end, where the best model had to be loaded.
        extras: further records of the adapter, see
            :meth:`~pytest_trlcompat.conformance.supervised.hooks.SupervisedHooks.surrounding`.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    micro_batches: list[MicroBatchRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    returned: list[dict[str, float]] = field(default_factory=list)
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    fingerprints: list[str] = field(default_factory=list)
    before_resuming: list[list[Row]] = field(default_factory=list)
    after_resuming: list[list[Row]] = field(default_factory=list)
    final: dict[str, torch.Tensor] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    in_evaluation: bool = False

    @property
    def training(self) -> list[MicroBatchRecord]:
        """Micro-batches that were trained on."""
        return [batch for batch in self.micro_batches if batch.evaluation is None]

    @property
    def trained_on(self) -> int:
        """How many micro-batches were trained on."""
        return len(self.training)
