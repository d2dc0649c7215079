"""Cure of ``grpo-adapter-seed`` and ``rloo-adapter-seed``: an adapter that follows from the seed.

Trainers of TRL make an adapter of their ``peft_config`` while they are built. Where they do so before they set the
seed, two trainings with the same seed begin with different adapters. The cure sets the seed first.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing.conditions import ADAPTER, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure, is_ours
from pytest_trlcompat.trainers.curing.patching import PatchPoint, replaced
from pytest_trlcompat.trainers.curing.upstream import codes_of

__all__ = ["AdapterSeedMixin"]

_MAKE = ("get_peft_model", "prepare_peft_model", "_prepare_peft_model")
"""By which of these TRL makes an adapter."""


class AdapterSeedMixin(Cure):
    """Sets the seed of a trainer of TRL's before its adapter is made.

    To what its arguments say, as the real call of TRL's ``__init__`` has them, and as Transformers sets it once more a
    little later; nothing without a ``peft_config``. What a user's class draws before that call is left alone.
    """

    _kinds: ClassVar = {
        "trainer": ("AdapterLoadingMixin", "neither calls the other; cures of one topic stand together"),
        "grpo": ("AdapterLoadingMixin", "neither calls the other; cures of one topic stand together"),
    }
    _seeded: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with ExitStack() as seeding:
            for point in _makers(type(self)):
                seeding.enter_context(replaced(point, self._seeding_first, AdapterSeedMixin.__name__))
            super().__init__(*args, **kwargs)

    def _seeding_first(self, upstream: Callable[..., None]) -> Callable[..., None]:
        # With the parameters, which another cure may ask for.
        @functools.wraps(upstream)
        def __init__(instance: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it is one
            if instance is self:
                from transformers import TrainingArguments, set_seed

                arguments = inspect.signature(upstream).bind(instance, *args, **kwargs).arguments
                if arguments.get("peft_config") is not None:
                    # Transformers sets the same seed once more when the adapter is there, so nothing after it changes.
                    set_seed((arguments.get("args") or TrainingArguments).seed)
                    self._seeded = True
            upstream(instance, *args, **kwargs)

        return __init__

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if not any(_makers(trainer_class)):
            return Activity(False, "no adapter is made before the seed is set")
        if trainer is not None and not trainer._seeded:
            return Activity(False, "no adapter was made of a peft_config")
        return under(trainer, "TRL makes adapters before it sets the seed", ADAPTER)


def _makers(cls: type) -> Iterator[PatchPoint]:
    """The ``__init__`` of each class of TRL's, among the bases, that makes an adapter before it sets the seed."""
    for base in cls.__mro__:
        if is_ours(base) or not base.__module__.startswith("trl.") or "__init__" not in vars(base):
            continue
        if _makes_before_it_seeds(vars(base)["__init__"]):
            yield PatchPoint(f"{base.__module__}:{base.__qualname__}.__init__")


def _makes_before_it_seeds(constructor: Callable[..., None]) -> bool:
    """Whether the names of what makes an adapter come first in its code, which lists names as it uses them."""
    for code in codes_of(constructor):
        first = next((name for name in code.co_names if name in (*_MAKE, "set_seed")), "")
        if first in _MAKE:
            return True
    return False
