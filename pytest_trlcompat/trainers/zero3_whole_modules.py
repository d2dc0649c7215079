"""Cure of ``lora-zero3-whole-modules``: adapters beside modules that learn whole, under ZeRO-3.

PEFT wraps such a module (``modules_to_save=["lm_head"]``) beside the copy that learns, and the wrapper has every
attribute that the one in use has. DeepSpeed gives each module functions and counters of its own, and asks first whether
it has them: the wrapper seems to, and uses those of the copy, whose counter was not begun: ``'Linear' object has no
attribute 'ds_grads_remaining'``, at the first forward in training. The cure leaves the wrapper only its own.

Imports nothing of the stack, and of this package ``_upstream``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pytest_trlcompat.trainers._upstream import replaced

__all__ = ["ZeRO3WholeModulesMixin", "own_hooks"]

_OWN = frozenset({"applied_pre_backward_ref_cnt", "ds_grads_remaining", "post_bwd_fn", "pre_bwd_fn"})
"""What DeepSpeed gives a module for its backward pass."""


def own_hooks() -> AbstractContextManager[None]:
    """While it lasts, a wrapper of PEFT's has of DeepSpeed's functions and counters only its own.

    Does nothing before PEFT was imported.
    """
    peft = sys.modules.get("peft.utils.other")
    if peft is None:
        return nullcontext()
    wrapper = getattr(peft, "AuxiliaryTrainingWrapper", peft.ModulesToSaveWrapper)  # its base from PEFT 0.15 on
    return replaced("__getattr__", _only_its_own, wrapper)


class ZeRO3WholeModulesMixin:
    """Lets a subclass of ``transformers.Trainer`` train whole modules beside an adapter under ZeRO-3.

    Does nothing without such modules, and with releases of DeepSpeed and PEFT that look at what a module itself has it
    makes no difference.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with own_hooks():  # PPO's engine is made here
            super().__init__(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with own_hooks():
            upstream: Any = super()
            return upstream.train(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with own_hooks():
            upstream: Any = super()
            return upstream.evaluate(*args, **kwargs)


def _only_its_own(upstream: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def __getattr__(self: Any, name: str) -> Any:  # noqa: N807 - it is one
        if name in _OWN:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return upstream(self, name)

    return __getattr__
