"""The corrected PPO trainer and its configuration: TRL's own with every cure for them in front. Imports the stack.

Importing it where TRL has no PPO (before 0.9.6, from 1.13.0 on) raises an ``ImportError`` that says what to install.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from pytest_trlcompat.trainers._ppo import ppo_config_class, ppo_trainer_class
from pytest_trlcompat.trainers.deepspeed_hooks import PPODeepSpeedHooksMixin
from pytest_trlcompat.trainers.empty_param_groups import EmptyParamGroupsMixin
from pytest_trlcompat.trainers.ppo_accelerator import PPOAcceleratorMixin
from pytest_trlcompat.trainers.ppo_accumulation import PPOAccumulationMixin
from pytest_trlcompat.trainers.ppo_adapter_reference import PPOAdapterReferenceMixin
from pytest_trlcompat.trainers.ppo_fsdp import PPOFSDPMixin
from pytest_trlcompat.trainers.ppo_newer_trainer import PPONewerTrainerMixin
from pytest_trlcompat.trainers.ppo_save import PPOSaveMixin
from pytest_trlcompat.trainers.zero3_whole_modules import ZeRO3WholeModulesMixin

__all__ = ["PPOConfig", "PPOTrainer"]

UpstreamConfig: Any = ppo_config_class()
UpstreamTrainer: Any = ppo_trainer_class()


class PPOConfig(UpstreamConfig):
    """The configuration of the installed release's PPO trainer: ``PPOv2Config``, or ``PPOConfig`` wherever it is.

    It can be made also after ``GRPOConfig`` was imported. With Transformers up to 4.50.3, trl 0.17.0 to 0.18.2 enter
    GRPO's ``model_init_kwargs`` into a list of fields that all configurations share, and TRL's own then ends in
    ``'PPOConfig' object has no attribute 'model_init_kwargs'``. And it takes ``deepspeed=...``, which TRL's does not.
    Nothing else differs; any PPO trainer takes it.
    """

    model_init_kwargs = None

    def __post_init__(self) -> None:
        # Upstream's field hides the property of TrainingArguments, which fills "auto" in DeepSpeed's configuration by
        # it: unsupported operand type(s) for *: 'NoneType' and 'int'. The trainer sets the field later.
        if self.deepspeed and self.__dict__.get("world_size", 1) is None:
            self.__dict__["world_size"] = int(os.environ.get("WORLD_SIZE", "1"))
        super().__post_init__()


class PPOTrainer(
    PPOAccumulationMixin,
    PPOSaveMixin,
    PPOFSDPMixin,
    PPOAdapterReferenceMixin,
    PPOAcceleratorMixin,
    PPONewerTrainerMixin,
    PPODeepSpeedHooksMixin,
    EmptyParamGroupsMixin,
    ZeRO3WholeModulesMixin,
    UpstreamTrainer,
):
    """TRL's PPO trainer of whichever release is installed, with known bugs cured.

    That is ``trl.trainer.ppov2_trainer.PPOv2Trainer`` (0.9.6 to 0.11), ``trl.PPOTrainer`` (0.12 to 0.25) or
    ``trl.experimental.ppo.PPOTrainer`` (0.26 to 1.12). Takes what that takes, is one, and behaves like it elsewhere. As
    upstream it cannot resume: ``train`` takes no checkpoint, and that of 0.9.6 writes none.

    =============================== ============================ ==================================================
    cure                            upstream                     does nothing
    =============================== ============================ ==================================================
    :mod:`.ppo_save`                trl 2122, 2375, 2885, 3301   in trl 0.9.6; in one process
    :mod:`.ppo_accelerator`         trl 2377, 2555, 3453         without DeepSpeed
    :mod:`.ppo_accumulation`        deepspeed 7718               without DeepSpeed
    :mod:`.ppo_fsdp`                trl 1726                     without FSDP
    :mod:`.ppo_adapter_reference`   none found                   before trl 0.13.0; in one process, under DeepSpeed,
                                                                 with a reference model
    :mod:`.ppo_newer_trainer`       none found                   from trl 0.12.0
    :mod:`.deepspeed_hooks`         trl 2962, 2304               from trl 1.5.0; from trl 0.16.0 with DeepSpeed from
                                                                 0.19.2 on
    :mod:`.empty_param_groups`      transformers 43692           without DeepSpeed
    :mod:`.zero3_whole_modules`     deepspeed 7203, 7615         with DeepSpeed before 0.16.5 and from 0.19.3 on, PEFT
                                                                 before 0.14; without ``modules_to_save``
    =============================== ============================ ==================================================
    """

    @functools.wraps(UpstreamTrainer.__init__)  # type: ignore[misc] # it is Any
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
