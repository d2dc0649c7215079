"""The corrected PPO trainer and its configuration: TRL's own with every cure for them in front. Imports the stack.

The configuration is the cure of ``ppo-config-after-grpo`` and ``ppo-deepspeed-argument``. Importing it where TRL has no
PPO raises an ``ImportError`` that says what to install.
"""

from __future__ import annotations

import os
from typing import Any

from pytest_trlcompat.trainers._ppo import ppo_config_class, ppo_trainer_class
from pytest_trlcompat.trainers.compose import cured

__all__ = ["PPOConfig", "PPOTrainer"]

UpstreamConfig: Any = ppo_config_class()
UpstreamTrainer: Any = ppo_trainer_class()


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


_Cured: Any = cured(UpstreamTrainer)


class PPOTrainer(_Cured):
    """TRL's PPO trainer of whichever release is installed, with known bugs cured.

    That is ``PPOv2Trainer``, ``trl.PPOTrainer`` or ``trl.experimental.ppo.PPOTrainer``. Takes what that takes, is one,
    and behaves like it elsewhere. As upstream it cannot resume: ``train`` takes no checkpoint. What is cured, where and
    by which of its bases: the page of cures; what that comes to on the installed stack: ``PPOTrainer.cures``.
    """
