"""Cure of ``lora-zero3-whole-modules``: adapters beside modules that learn whole, under ZeRO-3.

PEFT wraps such a module (``modules_to_save=["lm_head"]``) beside the copy that learns, and the wrapper has every
attribute that the one in use has. DeepSpeed gives each module functions and counters of its own, and asks first whether
it has them: the wrapper seems to, and uses those of the copy, whose counter was not begun: ``'Linear' object has no
attribute 'ds_grads_remaining'``, at the first forward in training. The cure leaves the wrapper only its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import ZERO3, Condition, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.patching import PatchPoint, extended

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ZeRO3WholeModulesMixin", "own_hooks"]

# Before 0.14 the wrapper gives away no attribute of what it wraps.
PEFT_WRAPPER = PatchPoint("peft.utils.other:AuxiliaryTrainingWrapper.__getattr__", ">=0.15")
PEFT_OLD_WRAPPER = PatchPoint("peft.utils.other:ModulesToSaveWrapper.__getattr__", ">=0.14,<0.15")

_OWN = frozenset({"applied_pre_backward_ref_cnt", "ds_grads_remaining", "post_bwd_fn", "pre_bwd_fn"})
"""What DeepSpeed gives a module for its backward pass."""
_FLAG = "_trlcompat_own_hooks"


_building: ContextVar[bool] = ContextVar("own_hooks", default=False)


@contextmanager
def own_hooks(model: nn.Module | None = None) -> Iterator[None]:
    """While the context lasts, a wrapper of PEFT's has only its own of DeepSpeed's functions and counters.

    In this context, for every wrapper, since some are made within it; and for those in ``model`` for good and in every
    thread, since a backward pass on an accelerator runs in threads of its own. Does nothing before PEFT was imported.
    PEFT's class is changed for good: to be entered under ZeRO-3 alone.
    """
    if "peft.utils.other" not in sys.modules:
        yield
        return
    for point in (PEFT_WRAPPER, PEFT_OLD_WRAPPER):
        extended(point, _only_its_own, ZeRO3WholeModulesMixin.__name__)
    for module in () if model is None else _wrappers(model):
        vars(module)[_FLAG] = True
    token = _building.set(True)
    try:
        yield
    finally:
        _building.reset(token)


def _wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """PEFT's, around modules that learn whole."""
    return (module for module in model.modules() if "modules_to_save" in module._modules)


class ZeRO3WholeModulesMixin(Cure):
    """Lets a subclass of ``transformers.Trainer`` train whole modules beside an adapter under ZeRO-3.

    Does nothing without such modules, and with releases of DeepSpeed and PEFT that look at what a module itself has it
    makes no difference.
    """

    _kinds: ClassVar = {
        "trainer": ("ZeRO3BiasesMixin", "its train calls this one's"),
        "grpo": ("ZeRO3BiasesMixin", "its train calls this one's"),
        "ppo": ("DecayedNormsMixin", "neither calls the other; it was measured here"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.TRAIN, patch_points.EVALUATE, PEFT_WRAPPER, PEFT_OLD_WRAPPER)
    _needed: ClassVar = (ZERO3,)
    model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # PPO's engine is made here, before anybody can ask the trainer's accelerator.
        with own_hooks() if _asks_for_zero3(*args, *kwargs.values()) else nullcontext():
            super().__init__(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with self._own_hooks():
            return super().train(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with self._own_hooks():
            upstream: Any = super()
            return upstream.evaluate(*args, **kwargs)

    def _own_hooks(self) -> AbstractContextManager[None]:
        return own_hooks(self.model) if ZERO3.holds(self) else nullcontext()

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        return under(trainer, "PEFT's wrapper keeps DeepSpeed's functions of its own", *cls._needed, _WHOLE_MODULES)


_WHOLE_MODULES = Condition(
    "with modules that learn whole",
    "no module learns whole beside an adapter",
    lambda trainer: any(True for _ in _wrappers(trainer.model)),
    needs="peft",
)


def _asks_for_zero3(*arguments: Any) -> bool:
    """Whether the settings among a trainer's arguments, or the accelerator of this process, are those of ZeRO-3."""
    plugins = [getattr(holder, "deepspeed_plugin", None) for holder in (*arguments, _process_state())]
    return any(getattr(plugin, "zero_stage", None) == 3 for plugin in plugins)


def _process_state() -> Any:
    """What all accelerators of this process share; ``None`` before there is one."""
    state: Any = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    return state() if state is not None and state._shared_state else None


def _only_its_own(upstream: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def __getattr__(self: Any, name: str) -> Any:  # noqa: N807 - it is one
        if name in _OWN and (_FLAG in vars(self) or _building.get()):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return upstream(self, name)

    return __getattr__
