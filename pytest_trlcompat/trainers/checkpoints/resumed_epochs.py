"""Cure of the prompts of the epoch in which a training is resumed.

Issues: ``grpo-resumed-epoch``, ``rloo-resumed-epoch``, ``distillation-resumed-epoch``.

TRL's sampler draws the order of each epoch from a generator of its own, which begins anew in a training that is
resumed: its first epoch then has the order of the very first one, whichever epoch it is. Transformers sees to that for
the samplers that it knows. The cure draws the orders of the epochs that have passed, and drops them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.upstream import definitions

__all__ = ["ResumedEpochsMixin"]

_ROUNDING = 1e-6
"""By which the epoch of a checkpoint may be below a whole number."""


class ResumedEpochsMixin(Cure):
    """Lets a trainer that repeats prompts go on with the order of prompts that the interrupted training would have had.

    A sampler that can be told its epoch, and one of another package than TRL, is left alone.
    """

    _kinds: ClassVar = {
        "trainer": ("ResumingMixin", "neither calls the other; cures of one topic stand together"),
        "grpo": ("ResumingMixin", "neither calls the other; cures of one topic stand together"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.trainer_method("_get_train_sampler"),)
    state: Any
    _sampled_by_trl: bool | None = None
    _dropped: int = 0

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        sampler = upstream._get_train_sampler(*args, **kwargs)
        self._sampled_by_trl = _begins_anew(sampler)
        if self._sampled_by_trl:
            _keep_in_step(sampler, self._epochs_passed, self._count)
        return sampler

    def _epochs_passed(self) -> int:
        return int((self.state.epoch or 0.0) + _ROUNDING)

    def _count(self) -> None:
        self._dropped += 1

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if all(package != "trl" for package, _, _ in definitions(trainer_class, "_get_train_sampler")):
            return Activity(False, "TRL makes no sampler of its own")
        if trainer is None or trainer._sampled_by_trl is None:
            return Activity(None, "in a training that is resumed after its first epoch")
        if not trainer._sampled_by_trl:
            return Activity(False, "the sampler knows its epoch, or is not TRL's")
        if trainer._dropped:
            return Activity(True, f"{trainer._dropped} epochs had passed when the training was resumed")
        return Activity(None, "in a training that is resumed after its first epoch")


def _begins_anew(sampler: Any) -> bool:
    """Whether it is one of TRL's that shuffles by a generator of its own, and cannot be told its epoch."""
    kind = type(sampler)
    return kind.__module__.startswith("trl.") and hasattr(sampler, "generator") and not hasattr(sampler, "set_epoch")


def _keep_in_step(sampler: Any, passed: Callable[[], int], count: Callable[[], None]) -> None:
    """Let it draw an order for each epoch that passed before it is asked for one; the same object, of its own class."""
    kind: Any = type(sampler)
    drawn = 0

    class InStep(kind):
        def __iter__(self) -> Iterator[Any]:
            nonlocal drawn
            # Asked here and not before: Trainer makes the sampler before it reads the checkpoint's state.
            while drawn < passed():
                # The first element is enough: TRL's sampler draws the order of a whole epoch before it yields one.
                next(iter(super().__iter__()), None)
                drawn += 1
                count()
            drawn += 1
            yield from super().__iter__()

    InStep.__name__, InStep.__qualname__, InStep.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    sampler.__class__ = InStep
