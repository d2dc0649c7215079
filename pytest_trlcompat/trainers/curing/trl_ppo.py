"""Where the installed TRL keeps its PPO trainer, and how to read what it wraps.

It was ``PPOv2Trainer`` beside an older ``PPOTrainer`` of another API (0.9.x to 0.11), then ``PPOTrainer`` (0.12), moved
to ``trl.experimental.ppo`` (0.26), and went (1.13).
"""

from __future__ import annotations

from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from packaging.version import Version

__all__ = ["is_first_rloo_trainer", "is_ppo_trainer", "ppo_config_class", "ppo_module", "ppo_trainer_class"]

# The first that is there: releases that moved or renamed the trainer keep an alias at the old location.
_LOCATIONS = (
    ("trl.experimental.ppo.ppo_trainer", "PPOTrainer", "PPOConfig"),
    ("trl.trainer.ppo_trainer", "PPOTrainer", "PPOConfig"),
    ("trl.trainer.ppov2_trainer", "PPOv2Trainer", "PPOv2Config"),
)
_RLOO = ("trl.trainer.rloo_trainer", "RLOOTrainer")


def is_ppo_trainer(trainer: type) -> bool:
    """Whether TRL's PPO trainer is among the bases of a ``transformers.Trainer``; nothing is imported for it."""
    places = {(module, name) for module, name, _ in _LOCATIONS}
    return any((base.__module__, base.__name__) in places for base in trainer.__mro__)


def is_first_rloo_trainer(trainer: type) -> bool:
    """Whether TRL's RLOO trainer up to 0.21, which has PPO's training loop, is among the bases of a trainer.

    The newer one of that name leaves ``train`` to ``transformers.Trainer``. Nothing is imported for it.
    """
    places = [base for base in trainer.__mro__ if (base.__module__, base.__name__) == _RLOO]
    return any("train" in vars(base) for base in places)


def ppo_module() -> ModuleType:
    """The module that holds the trainer and the global names which its methods look up.

    Raises:
        ImportError: the installed TRL has none, with what to install.
    """
    return _find()[0]


def ppo_trainer_class() -> Any:
    """TRL's PPO trainer, a ``transformers.Trainer``, under whichever name.

    TRL's own, also where a subclass has taken its place in TRL's module.

    Raises:
        ImportError: see :func:`ppo_module`.
    """
    module, name, _ = _find()
    return next(base for base in getattr(module, name).__mro__ if base.__module__.partition(".")[0] == "trl")


def ppo_config_class() -> Any:
    """The configuration that :func:`ppo_trainer_class` takes.

    Raises:
        ImportError: see :func:`ppo_module`.
    """
    module, _, name = _find()
    return getattr(module, name)


def _find() -> tuple[ModuleType, str, str]:
    from transformers import Trainer

    for module_name, trainer, config in _LOCATIONS:
        if _exists(module_name):
            module = import_module(module_name)
            if issubclass(getattr(module, trainer), Trainer):  # the old API's is none
                return module, trainer, config
    raise ImportError(_why_not(metadata.version("trl")))


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package on the way to it
        return False


def _why_not(version: str) -> str:
    if Version(version) < Version("0.12"):
        return (
            f"trl {version} has no PPO trainer that is a transformers.Trainer, only the old one with a step() method; "
            "install trl>=0.9.6,<1.13 for PPOv2Trainer or PPOTrainer"
        )
    return (
        f"trl {version} has no PPO trainer: it was removed in trl 1.13.0; install trl>=0.9.6,<1.13 (1.12.0 is the last "
        "release that has it), or train with GRPOTrainer or RLOOTrainer"
    )
