"""Cure of ``deepspeed-hook-registration`` (trl 2962): hooks that come back with every DeepSpeed.

After generation under ZeRO-3 TRL registers DeepSpeed's hooks again, by a private method that DeepSpeed 0.16.4 renamed.
Up to 0.15 TRL knows only the old name, and ends the first step with ``'DeepSpeedZeRoOffload' object has no attribute
'_register_hooks_recursively'``; a TRL that knows only the new one does not work with an older DeepSpeed either.

Imports nothing of the stack but TRL's utilities, when asked, and of this package ``_upstream``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

from pytest_trlcompat.trainers._upstream import AroundGeneration, replaced

__all__ = ["DeepSpeedHooksMixin", "PPODeepSpeedHooksMixin", "add_hooks", "hooks_added_by_any_name"]

_NAMES = ("_register_deepspeed_module", "_register_hooks_recursively")
"""What DeepSpeed calls the method, from 0.16.4 on and before."""


def add_hooks(engine: Any) -> None:
    """Register DeepSpeed's ZeRO-3 hooks on the module of ``engine``, by whichever method this DeepSpeed has.

    Raises:
        RuntimeError: the engine has no ZeRO-3 hooks, or DeepSpeed has renamed the method once more.
    """
    optimizer = getattr(engine, "optimizer", None)
    offload: Any = getattr(optimizer, "parameter_offload", optimizer)
    register = next((getattr(offload, name) for name in _NAMES if hasattr(offload, name)), None)
    if register is None:
        raise RuntimeError(
            f"asked to register ZeRO-3 hooks on {type(engine).__name__}, but {type(offload).__name__} has none of "
            f"{', '.join(_NAMES)}; is this an engine of ZeRO stage 3, and of a DeepSpeed that TRL knows?"
        )
    register(offload.module)


class DeepSpeedHooksMixin(AroundGeneration):
    """Lets a subclass of ``trl.GRPOTrainer`` register DeepSpeed's hooks by the name that they have (trl 2962).

    Needless from trl 0.16.0 on, and with DeepSpeed up to 0.16.3. It knows by trying: TRL's own function runs first, and
    ours only where that asks DeepSpeed for a method which it has not.
    """

    @contextmanager
    def _around_generation(self) -> Iterator[None]:
        with hooks_added_by_any_name(), super()._around_generation():
            yield


class PPODeepSpeedHooksMixin:
    """The same for a subclass of TRL's PPO trainer, which generates within ``train``."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with hooks_added_by_any_name():
            upstream: Any = super()
            return upstream.train(*args, **kwargs)

    def generate_completions(self, *args: Any, **kwargs: Any) -> Any:
        with hooks_added_by_any_name():
            upstream: Any = super()
            return upstream.generate_completions(*args, **kwargs)


def hooks_added_by_any_name() -> AbstractContextManager[None]:
    """Lend TRL an ``add_hooks`` that works with every DeepSpeed, while the context lasts."""
    return replaced("add_hooks", _by_any_name, import_module("trl.models.utils"))


def _by_any_name(upstream: Callable[[Any], None]) -> Callable[[Any], None]:
    def add_hooks_by_any_name(engine: Any) -> None:
        try:
            upstream(engine)
        except AttributeError as error:
            if error.name not in _NAMES:
                raise
            add_hooks(engine)

    return add_hooks_by_any_name
