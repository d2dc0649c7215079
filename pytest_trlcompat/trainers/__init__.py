"""Corrected trainers: TRL's own, with known bugs cured and everything else untouched.

    from pytest_trlcompat.trainers import GRPOTrainer

One module per cure, in a folder for its topic, each usable alone, as functions or as a mixin in front of your own
subclass of TRL's trainer::

    class MyTrainer(LogitsToKeepMixin, trl.GRPOTrainer): ...

Importing this package imports nothing of the stack; asking it for a name does. No module here imports pytest or any
other part of the harness, so that users can train with them. Its names are what its modules export; see
``curing.names``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from pytest_trlcompat.trainers.curing.names import MODULES

# Some releases of TRL have no PPO: importing everything must not fail for that.
__all__ = [name for name in MODULES if name not in ("PPOConfig", "PPOTrainer")]


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULES})
