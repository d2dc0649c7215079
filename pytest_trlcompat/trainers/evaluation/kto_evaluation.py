"""Cure of ``kto-evaluation-mismatch``: an evaluation of KTO whose divergence is estimated within its own batches.

KTO estimates its reference point from prompts with completions of other rows of the batch. TRL exchanges completions
when it prepares a dataset, among as many rows as a batch of training has, that of an evaluation, too: where batches of
evaluations have another size, ``eval_kl`` and ``eval_loss`` depend on rows of other batches. The cure prepares datasets
of evaluations with the size of their own batches. Of batches of one row there is nothing to exchange: there TRL's way
is left.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.errors import CureError, leaving_out
from pytest_trlcompat.trainers.curing.patching import PatchPoint
from pytest_trlcompat.trainers.curing.upstream import method_uses

__all__ = ["KTOEvaluationMixin"]

_PREPARE = "_prepare_dataset"
_EXCHANGE = "_get_kl_dataset"
"""A method of its own in some releases."""
_SIZE = "per_device_train_batch_size"


class KTOEvaluationMixin(Cure):
    """Prepares the datasets of evaluations of ``trl.KTOTrainer`` by ``per_device_eval_batch_size``.

    Raises:
        CureError: the first dataset that is prepared is not that of the training.
    """

    _kinds: ClassVar = {
        "trainer": ("PrecomputedReferenceMixin", "neither calls the other; it was measured here"),
    }
    _points: ClassVar[patch_points.Points] = (
        PatchPoint("trl.experimental.kto.kto_trainer:KTOTrainer._prepare_dataset", ">=1.3,<1.8"),
        PatchPoint("trl.trainer.kto_trainer:KTOTrainer._prepare_dataset", ">=1.8"),
    )
    _prepares_evaluations: bool = False

    def _prepare_dataset(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        if not _exchanges(type(self)):
            return upstream._prepare_dataset(*args, **kwargs)
        bound = inspect.signature(upstream._prepare_dataset).bind(*args, **kwargs)
        # By the order as well as the name: TRL names evaluations' datasets by the user's keys, and one may be "train".
        if not self._prepares_evaluations:
            if bound.arguments.get("dataset_name") != "train":
                raise CureError(
                    "KTOEvaluationMixin",
                    expected="the training's dataset to be the first that is prepared",
                    seen=f"one named {bound.arguments.get('dataset_name')!r}",
                    packages=("trl",),
                    remedy="Build the trainer with a train_dataset" + leaving_out("KTOEvaluationMixin"),
                )
            self._prepares_evaluations = True
        elif _differs(bound.arguments["args"]):
            # A copy, since the trainer's own arguments say how large a batch of its training is.
            config = copy.copy(bound.arguments["args"])
            vars(config)[_SIZE] = config.per_device_eval_batch_size
            bound.arguments["args"] = config
        return upstream._prepare_dataset(*bound.args, **bound.kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if not _exchanges(trainer_class):
            return Activity(False, "the trainer exchanges no completions when it prepares a dataset")
        if trainer is None:
            return Activity(None, "where batches of evaluations have another size than those of the training")
        if not _differs(trainer.args):
            return Activity(False, "batches of evaluations have the size of those of the training, or one row")
        return Activity(True, "completions of evaluations are exchanged within their own batches")


def _exchanges(cls: type) -> bool:
    """Whether preparing a dataset looks at the size of the training's batches: by itself, or where it exchanges."""
    apart = method_uses(cls, _PREPARE, _EXCHANGE) and method_uses(cls, _EXCHANGE, _SIZE)
    return apart or method_uses(cls, _PREPARE, _SIZE)


def _differs(config: Any) -> bool:
    return 1 < config.per_device_eval_batch_size != config.per_device_train_batch_size
