"""Cure of ``grpo-eval-remainder`` and ``rloo-eval-remainder``: the rows of the last batch that evaluations leave out.

TRL's sampler repeats each prompt for its generations. Accelerate does not know: it takes the prompts for rows, works
out from their number how many rows of the last batch are there only to fill it, and drops as many of the gathered
losses. ``eval_loss`` then is that of the first ranks, or weighs the last batch wrongly. The cure gives Accelerate the
number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import defined_by
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.errors import CureError

__all__ = ["EvaluationRemainderMixin"]


class EvaluationRemainderMixin(Cure):
    """Has the evaluation of a trainer that repeats prompts, as GRPO and RLOO do, count rows and not prompts.

    It knows by the sampler: one that repeats nothing is left alone.
    """

    _kinds: ClassVar = {
        "trainer": ("DecayedNormsMixin", "neither calls the other; it was measured here"),
        "grpo": ("EvaluationMixin", "neither calls the other; cures of one topic stand together"),
    }
    _points: ClassVar[patch_points.Points] = (
        patch_points.trainer_method("get_eval_dataloader"),
        patch_points.trainer_method("evaluation_loop"),
        patch_points.in_grpo("GRPOTrainer._get_eval_sampler", ">=0.15"),
    )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        upstream: Any = super()
        trainer: Any = self
        if not _samples(type(self)):
            return upstream.get_eval_dataloader(eval_dataset)
        # Before a loader holds them: `evaluation_loop` sets an attribute on what that holds.
        if isinstance(trainer.eval_dataset, dict):
            trainer.eval_dataset = {name: _with_attributes(data) for name, data in trainer.eval_dataset.items()}
        else:
            trainer.eval_dataset = _with_attributes(trainer.eval_dataset)
        return upstream.get_eval_dataloader(_with_attributes(eval_dataset))

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        with _of_length(dataloader.dataset, self._evaluated_rows(dataloader.dataset)):
            return upstream.evaluation_loop(dataloader, *args, **kwargs)

    def _evaluated_rows(self, dataset: Any) -> int | None:
        """How many there are, if it is known and not the number of prompts."""
        if not _samples(type(self)) or not _has_length(dataset):
            return None
        trainer: Any = self
        sampler = trainer._get_eval_sampler(dataset)
        rows = len(sampler) if isinstance(sampler, Sized) else len(dataset)
        return None if rows == len(dataset) else rows

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if not _samples(trainer_class):
            return Activity(False, "the sampler of evaluations is Transformers'")
        data = [] if trainer is None else _data_sets(trainer.eval_dataset)
        if not data:
            return Activity(None, "where it evaluates: Accelerate counts prompts for rows")
        if all(trainer._evaluated_rows(dataset) is None for dataset in data):
            return Activity(False, "the sampler of evaluations repeats no prompt")
        return Activity(True, "Accelerate counts prompts for rows")


def _samples(trainer_class: type) -> bool:
    """Whether evaluations have a sampler of TRL's or a user's, and not Transformers'."""
    return defined_by(trainer_class, "_get_eval_sampler") != "transformers"


def _has_length(dataset: Any) -> bool:
    """Whether a data set has a length; Accelerate's shard of a stream has one for some data only."""
    try:
        len(dataset)
    except TypeError:
        return False
    return True


def _data_sets(eval_dataset: Any) -> list[Any]:
    """Those of a trainer, which may have one, several by their names, or none."""
    if eval_dataset is None:
        return []
    return list(eval_dataset.values()) if isinstance(eval_dataset, dict) else [eval_dataset]


class _Rows(list[Any]):
    """A list that Accelerate can read another length of, which a plain one, or a tuple, cannot hold."""


def _with_attributes(dataset: Any) -> Any:
    return _Rows(dataset) if type(dataset) in (list, tuple) else dataset


@contextmanager
def _of_length(dataset: Any, rows: int | None) -> Iterator[None]:
    """Have Accelerate find so many rows in a dataset, by the attribute that it reads, while the context lasts."""
    if rows is None:
        yield
        return
    try:
        dataset.total_dataset_length = rows
    except AttributeError:
        raise CureError(
            "EvaluationRemainderMixin",
            expected="an evaluation data set that takes the attribute total_dataset_length, by which Accelerate counts",
            seen=f"this {type(dataset).__name__} takes no attribute",
            packages=("accelerate",),
            remedy="Evaluate on a datasets.Dataset or on a list",
        ) from None
    try:
        yield
    finally:
        del dataset.total_dataset_length
