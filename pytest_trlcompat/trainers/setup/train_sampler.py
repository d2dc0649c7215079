"""Cure of ``grpo-train-sampler`` and ``kto-train-sampler``: a sampler for each Transformers, whether or not it passes
the data set.

A newer Transformers calls ``_get_train_sampler(train_dataset)``. An older TRL defines that method without an argument,
and training ends before it begins: ``GRPOTrainer._get_train_sampler() takes 1 positional argument but 2 were given``.
KTO's and BCO's trainers of these releases define it, too.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.cure import Activity, Cure

__all__ = ["TrainSamplerMixin"]


class TrainSamplerMixin(Cure):
    """Lets a trainer whose ``_get_train_sampler`` takes no data set be trained by a Transformers that passes one.

    It knows by the signature of the trainer's method.
    """

    _kinds: ClassVar = {
        "trainer": ("CheckpointNamesMixin", "neither calls the other; it was measured here"),
        "grpo": ("CheckpointNamesMixin", "neither calls the other; it was measured here"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.trainer_method("_get_train_sampler"),)
    train_dataset: Any

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        method = upstream._get_train_sampler
        if (args or kwargs) and not _takes_a_dataset(method):
            # Such a method samples from the trainer's own data set, of which Transformers may have dropped columns.
            return method()
        return method(*args, **kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        from transformers import Trainer

        upstream: Any = super(TrainSamplerMixin, trainer_class)
        if _takes_a_dataset(partial(upstream._get_train_sampler, None)):
            return Activity(False, "the trainer's sampler takes the data set")
        if not _takes_a_dataset(partial(Trainer._get_train_sampler, None)):
            return Activity(False, "Transformers passes its sampler nothing")
        loader = inspect.unwrap(upstream.get_train_dataloader)
        if loader is not Trainer.get_train_dataloader and "_get_train_sampler" in loader.__code__.co_names:
            return Activity(False, "the trainer makes its own data loader")
        return Activity(True, "Transformers passes the data set to the trainer's sampler, which takes none")


def _takes_a_dataset(method: Any) -> bool:
    return bool(inspect.signature(method).parameters)
