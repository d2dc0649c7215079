"""The corrected PPO trainer: TRL's own with every cure for it in front. Imports the stack."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.trainers._ppo import ppo_config_class, ppo_trainer_class
from pytest_trlcompat.trainers.parameter_groups import NoEmptyParameterGroupsMixin
from pytest_trlcompat.trainers.ppo_accelerator import PPOAcceleratorMixin
from pytest_trlcompat.trainers.ppo_fsdp import PPOFSDPMixin
from pytest_trlcompat.trainers.ppo_save import PPOSaveMixin

__all__ = ["PPOConfig", "PPOTrainer"]

if TYPE_CHECKING:
    Upstream, UpstreamConfig = Any, Any
else:
    Upstream, UpstreamConfig = ppo_trainer_class(), ppo_config_class()


class PPOConfig(UpstreamConfig):
    # trl 0.17 to 0.20 add this name to a list of Transformers' up to 4.50.3 that all configurations share: once
    # GRPOConfig was imported, PPOConfig() ends in 'PPOConfig' object has no attribute 'model_init_kwargs'.
    model_init_kwargs = None


class PPOTrainer(PPOSaveMixin, PPOFSDPMixin, PPOAcceleratorMixin, NoEmptyParameterGroupsMixin, Upstream):
    @functools.wraps(Upstream.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
