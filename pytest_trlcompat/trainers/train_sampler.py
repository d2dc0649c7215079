"""Cure of ``grpo-train-sampler``: a sampler for each Transformers, whether or not it passes the data set.

A newer Transformers calls ``_get_train_sampler(train_dataset)``. An older TRL defines that method without an argument,
and training ends before it begins: ``GRPOTrainer._get_train_sampler() takes 1 positional argument but 2 were given``.

Imports nothing of the stack.
"""

from __future__ import annotations

import inspect
from typing import Any

from pytest_trlcompat.trainers._cure import Cure

__all__ = ["TrainSamplerMixin"]


class TrainSamplerMixin(Cure):
    """Lets a subclass of ``trl.GRPOTrainer`` make its sampler with and without the data set.

    It knows by the signature of TRL's method.
    """

    train_dataset: Any

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        method = upstream._get_train_sampler
        if (args or kwargs) and not _takes_a_dataset(method):
            # TRL's method samples from the trainer's own data set, of which Transformers may have dropped columns.
            return method()
        return method(*args, **kwargs)


def _takes_a_dataset(method: Any) -> bool:
    return bool(inspect.signature(method).parameters)
