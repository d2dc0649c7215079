"""Corrected trainers: TRL's own, with known bugs cured and everything else untouched.

    from pytest_trlcompat.trainers import GRPOTrainer

One module per cure, each usable alone, as functions or as a mixin in front of your own subclass of TRL's trainer::

    class MyTrainer(LogitsToKeepMixin, trl.GRPOTrainer): ...

Importing this package imports nothing of the stack; asking it for a name does. No module here imports pytest or a
room of the harness, so that users can train with them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_trlcompat.trainers.device_map import OneDevicePerRankMixin
    from pytest_trlcompat.trainers.fsdp_generation import FSDPGenerationMixin
    from pytest_trlcompat.trainers.fsdp_gradients import FSDPGradientsMixin
    from pytest_trlcompat.trainers.fsdp_ref_model import FSDPReferenceModelMixin
    from pytest_trlcompat.trainers.fsdp_save import FSDPSaveMixin
    from pytest_trlcompat.trainers.fsdp_sync_ref_model import FSDPSyncRefModelCallback, FSDPSyncRefModelMixin
    from pytest_trlcompat.trainers.grpo import GRPOTrainer
    from pytest_trlcompat.trainers.logits_to_keep import LogitsToKeepMixin

__all__ = [
    "FSDPGenerationMixin",
    "FSDPGradientsMixin",
    "FSDPReferenceModelMixin",
    "FSDPSaveMixin",
    "FSDPSyncRefModelCallback",
    "FSDPSyncRefModelMixin",
    "GRPOTrainer",
    "LogitsToKeepMixin",
    "OneDevicePerRankMixin",
]

_MODULES = {
    "FSDPGenerationMixin": "fsdp_generation",
    "FSDPGradientsMixin": "fsdp_gradients",
    "FSDPReferenceModelMixin": "fsdp_ref_model",
    "FSDPSaveMixin": "fsdp_save",
    "FSDPSyncRefModelCallback": "fsdp_sync_ref_model",
    "FSDPSyncRefModelMixin": "fsdp_sync_ref_model",
    "GRPOTrainer": "grpo",
    "LogitsToKeepMixin": "logits_to_keep",
    "OneDevicePerRankMixin": "device_map",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
