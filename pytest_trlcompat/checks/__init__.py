"""Checks: invariants of training that anyone can assert on a model, a trainer or a checkpoint, in real training too.

As functions, each of which raises :class:`CheckError` that says what was expected, what was found and what to do::

    from pytest_trlcompat.checks import check_reference_model

    check_reference_model(trainer.ref_model, trainer.model)

or all of them around a training::

    from pytest_trlcompat.checks import CompatCallback

    trainer.add_callback(CompatCallback(trainer))

With several ranks every function is collective: all must call it at the same point, and all raise if one does.
Importing this package does not import the stack; accessing one of its names does. No module here imports pytest or a
package of the harness, so that users can train with them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_trlcompat.checks._ranks import CheckError
    from pytest_trlcompat.checks.callback import CHECKS, CompatCallback, Outcome
    from pytest_trlcompat.checks.checkpoint import check_checkpoint
    from pytest_trlcompat.checks.gradients import GradientReport, check_gradients
    from pytest_trlcompat.checks.logits import LogitsCalls, check_logits
    from pytest_trlcompat.checks.memory import Memory, check_memory, read_memory
    from pytest_trlcompat.checks.parameters import WeightsBefore, check_moved, check_trainable
    from pytest_trlcompat.checks.reference import check_reference_model

__all__ = [
    "CHECKS",
    "CheckError",
    "CompatCallback",
    "GradientReport",
    "LogitsCalls",
    "Memory",
    "Outcome",
    "WeightsBefore",
    "check_checkpoint",
    "check_gradients",
    "check_logits",
    "check_memory",
    "check_moved",
    "check_reference_model",
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
    "Outcome": "callback",
    "WeightsBefore": "parameters",
    "check_checkpoint": "checkpoint",
    "check_gradients": "gradients",
    "check_logits": "logits",
    "check_memory": "memory",
    "check_moved": "parameters",
    "check_reference_model": "reference",
    "check_trainable": "parameters",
    "read_memory": "memory",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
