"""Cure of ``ppo-accelerate-state``: PPO under DeepSpeed, with the plugin of its own arguments.

TRL's PPO trainer makes an ``Accelerator`` without a DeepSpeed plugin, where ``transformers.Trainer`` passes the one of
its arguments. Some releases of Accelerate then take the process state that the arguments have left for that of an
earlier accelerator, which there is none of: ``Please make sure to properly initialize your accelerator``. All others
make a plugin from the environment of ``accelerate launch`` and never see ``PPOConfig(deepspeed=...)``. The cure passes
the plugin.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from accelerate.state import AcceleratorState

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import DEEPSPEED, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.patching import PatchPoint, replaced

__all__ = ["PPOAcceleratorMixin", "accelerator_of_arguments"]

ACCELERATOR = PatchPoint("accelerate.accelerator:Accelerator.__init__")


def accelerator_of_arguments(args: Any) -> AbstractContextManager[None]:
    """While it lasts, TRL's PPO trainer makes its accelerator with the DeepSpeed plugin of ``args``.

    Does nothing without DeepSpeed, and where an accelerator is there already: Accelerate then takes its plugin.
    """
    plugin = getattr(args, "deepspeed_plugin", None)
    if plugin is None or AcceleratorState._shared_state:
        return nullcontext()

    def with_plugin(upstream: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, *more: Any, **keywords: Any) -> None:  # noqa: N807 - it is one
            # Without it Accelerate 1.0 to 1.8 takes what the arguments have left for an earlier accelerator's state.
            upstream(self, *more, **{"deepspeed_plugin": plugin, **keywords})

        return __init__

    return replaced(ACCELERATOR, with_plugin, PPOAcceleratorMixin.__name__)


class PPOAcceleratorMixin(Cure):
    """Lets a subclass of TRL's PPO trainer be built under DeepSpeed.

    Unless DeepSpeed is configured by ``PPOConfig(deepspeed=...)``, the plugin that it passes is equal to the one that
    the accelerator would have made.
    """

    _kinds: ClassVar = {
        "ppo": ("PPOAdapterReferenceMixin", "neither calls the other; cures of one topic stand together"),
    }
    _points: ClassVar[patch_points.Points] = (ACCELERATOR,)
    _needed: ClassVar = (DEEPSPEED,)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # PPOv2Trainer calls its first parameter `config`.
        settings = args[0] if args else kwargs.get("args", kwargs.get("config"))
        with accelerator_of_arguments(settings):
            super().__init__(*args, **kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        return under(trainer, "TRL makes its accelerator without the arguments' plugin", *cls._needed)
