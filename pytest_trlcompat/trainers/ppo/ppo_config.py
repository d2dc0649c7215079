"""Cure of ``ppo-config-after-grpo`` and ``ppo-deepspeed-argument``: the configuration of TRL's PPO trainer.

Importing it where TRL has no PPO raises an ``ImportError`` that says what to install.
"""

from __future__ import annotations

import os
from typing import Any

from pytest_trlcompat.trainers.curing.trl_ppo import ppo_config_class

__all__ = ["PPOConfig"]

UpstreamConfig: Any = ppo_config_class()


class PPOConfig(UpstreamConfig):
    """The configuration of the installed release's PPO trainer: ``PPOv2Config``, or ``PPOConfig`` wherever it is.

    It can be made also after ``GRPOConfig`` was imported: TRL may enter GRPO's ``model_init_kwargs`` into a list of
    fields that all configurations share, and its own then ends in ``'PPOConfig' object has no attribute
    'model_init_kwargs'``. And it takes ``deepspeed=...``, which TRL's does not. Nothing else differs; any PPO trainer
    takes it.
    """

    model_init_kwargs = None

    def __post_init__(self) -> None:
        # Upstream's field hides the property of TrainingArguments, which fills "auto" in DeepSpeed's configuration by
        # it: unsupported operand type(s) for *: 'NoneType' and 'int'. The trainer sets the field later.
        if self.deepspeed and self.__dict__.get("world_size", 1) is None:
            self.__dict__["world_size"] = int(os.environ.get("WORLD_SIZE", "1"))
        super().__post_init__()
