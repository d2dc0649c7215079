"""Checks: invariants of training that anyone can assert on a model, a trainer or a checkpoint, in real training too.

Each check is a function. It raises :class:`CheckError`, which says what was expected, what was found and what to do, or
its subclass :class:`OddError` where that may be intended::

    from pytest_trlcompat.checks import check_reference_model

    check_reference_model(trainer.ref_model, trainer.model)

:class:`CompatCallback` runs all of them during a training::

    from pytest_trlcompat.checks import CompatCallback

    trainer.add_callback(CompatCallback(trainer))

With several ranks every function is collective: all ranks must call it at the same point, and all raise if one does.
Importing this package does not import the stack; accessing one of its names does. Nothing here needs pytest, so a
training of your own can use it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_trlcompat.checks._ranks import CheckError, OddError
    from pytest_trlcompat.checks.batches import check_batches
    from pytest_trlcompat.checks.callback import CHECKS, OPTIONAL, CompatCallback, Outcome
    from pytest_trlcompat.checks.checkpoint import check_checkpoint
    from pytest_trlcompat.checks.gradients import GradientReport, check_gradients
    from pytest_trlcompat.checks.logits import LogitsCalls, check_logits
    from pytest_trlcompat.checks.memory import Memory, check_memory, read_memory
    from pytest_trlcompat.checks.parameters import WeightsBefore, check_finite, check_moved, check_trainable
    from pytest_trlcompat.checks.reference import check_reference_model
    from pytest_trlcompat.checks.repeat import check_repeatable
    from pytest_trlcompat.checks.replicas import check_replicas
    from pytest_trlcompat.checks.schedule import check_schedule

__all__ = [
    "CHECKS",
    "OPTIONAL",
    "CheckError",
    "CompatCallback",
    "GradientReport",
    "LogitsCalls",
    "Memory",
    "OddError",
    "Outcome",
    "WeightsBefore",
    "check_batches",
    "check_checkpoint",
    "check_finite",
    "check_gradients",
    "check_logits",
    "check_memory",
    "check_moved",
    "check_reference_model",
    "check_repeatable",
    "check_replicas",
    "check_schedule",
    "check_trainable",
    "read_memory",
]

_MODULES = {
    "CHECKS": "callback",
    "CheckError": "_ranks",
    "CompatCallback": "callback",
    "GradientReport": "gradients",
    "LogitsCalls": "logits",
    "Memory": "memory",
    "OPTIONAL": "callback",
    "OddError": "_ranks",
    "Outcome": "callback",
    "WeightsBefore": "parameters",
    "check_batches": "batches",
    "check_checkpoint": "checkpoint",
    "check_finite": "parameters",
    "check_gradients": "gradients",
    "check_logits": "logits",
    "check_memory": "memory",
    "check_moved": "parameters",
    "check_reference_model": "reference",
    "check_repeatable": "repeat",
    "check_replicas": "replicas",
    "check_schedule": "schedule",
    "check_trainable": "parameters",
    "read_memory": "memory",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
