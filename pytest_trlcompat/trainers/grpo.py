"""The corrected GRPO trainer: TRL's own with every cure for it in front. Imports the stack."""

from __future__ import annotations

import functools
from typing import Any

import trl

from pytest_trlcompat.trainers.adapter_loading import AdapterLoadingMixin
from pytest_trlcompat.trainers.checkpointed_generation import CheckpointedGenerationMixin
from pytest_trlcompat.trainers.deepspeed_accumulation import DeepSpeedAccumulationMixin
from pytest_trlcompat.trainers.deepspeed_evaluation import DeepSpeedEvaluationMixin
from pytest_trlcompat.trainers.deepspeed_hooks import DeepSpeedHooksMixin
from pytest_trlcompat.trainers.device_map import OneDevicePerRankMixin
from pytest_trlcompat.trainers.empty_param_groups import EmptyParamGroupsMixin
from pytest_trlcompat.trainers.evaluation import EvaluationMixin
from pytest_trlcompat.trainers.evaluation_remainder import EvaluationRemainderMixin
from pytest_trlcompat.trainers.fsdp2_grad_norm import FSDP2GradNormMixin
from pytest_trlcompat.trainers.fsdp_adapter_generation import FSDPAdapterGenerationMixin
from pytest_trlcompat.trainers.fsdp_adapter_save import FSDPAdapterSaveMixin
from pytest_trlcompat.trainers.fsdp_generation import FSDPGenerationMixin
from pytest_trlcompat.trainers.fsdp_gradients import FSDPGradientsMixin
from pytest_trlcompat.trainers.fsdp_ref_model import FSDPReferenceModelMixin
from pytest_trlcompat.trainers.fsdp_save import FSDPSaveMixin
from pytest_trlcompat.trainers.fsdp_sync_ref_model import FSDPSyncRefModelMixin
from pytest_trlcompat.trainers.gradient_accumulation import GradientAccumulationMixin
from pytest_trlcompat.trainers.logits_to_keep import LogitsToKeepMixin
from pytest_trlcompat.trainers.lora_checkpointing import LoraCheckpointingMixin
from pytest_trlcompat.trainers.plain_logprobs import PlainLogProbsMixin
from pytest_trlcompat.trainers.resuming import ResumingMixin
from pytest_trlcompat.trainers.sampling import SamplingMixin
from pytest_trlcompat.trainers.token_normalizer import TokenNormalizerMixin
from pytest_trlcompat.trainers.train_sampler import TrainSamplerMixin
from pytest_trlcompat.trainers.warnings_issued import WarningsIssuedMixin
from pytest_trlcompat.trainers.zero3_biases import ZeRO3BiasesMixin
from pytest_trlcompat.trainers.zero3_generation import ZeRO3GenerationMixin
from pytest_trlcompat.trainers.zero3_lora_checkpointing import ZeRO3LoraCheckpointingMixin
from pytest_trlcompat.trainers.zero3_whole_modules import ZeRO3WholeModulesMixin

__all__ = ["GRPOTrainer"]


class GRPOTrainer(
    GradientAccumulationMixin,
    DeepSpeedAccumulationMixin,
    TokenNormalizerMixin,
    SamplingMixin,
    CheckpointedGenerationMixin,
    PlainLogProbsMixin,
    LogitsToKeepMixin,
    FSDPSyncRefModelMixin,
    FSDPReferenceModelMixin,
    FSDPGenerationMixin,
    FSDPAdapterGenerationMixin,
    ZeRO3GenerationMixin,
    DeepSpeedHooksMixin,
    DeepSpeedEvaluationMixin,
    EmptyParamGroupsMixin,
    EvaluationMixin,
    EvaluationRemainderMixin,
    ResumingMixin,
    TrainSamplerMixin,
    LoraCheckpointingMixin,
    ZeRO3LoraCheckpointingMixin,
    ZeRO3BiasesMixin,
    ZeRO3WholeModulesMixin,
    FSDPGradientsMixin,
    FSDP2GradNormMixin,
    FSDPSaveMixin,
    FSDPAdapterSaveMixin,
    AdapterLoadingMixin,
    OneDevicePerRankMixin,
    WarningsIssuedMixin,
    trl.GRPOTrainer,
):
    """``trl.GRPOTrainer`` of whichever release is installed, from 0.14.0 on, with known bugs cured.

    Takes what ``trl.GRPOTrainer`` takes, is one, and behaves like it elsewhere.

    ================================ ============================ ==================================================
    cure                             upstream                     does nothing
    ================================ ============================ ==================================================
    :mod:`.logits_to_keep`           trl 2770                     from trl 0.20.0; from 0.16.0 where the model honours
                                                                  ``logits_to_keep``
    :mod:`.fsdp_ref_model`           trl 3348                     from trl 0.18.0 (FSDP1), 0.29.0 (FSDP2)
    :mod:`.fsdp_generation`          trl 2796                     from trl 0.18.0
    :mod:`.zero3_generation`         trl 2782                     from trl 0.16.0
    :mod:`.deepspeed_hooks`          trl 2962, 4693               from trl 1.5.0; from trl 0.16.0 with DeepSpeed from
                                                                  0.19.2 on
    :mod:`.deepspeed_evaluation`     transformers 44889           without an evaluation before training
    :mod:`.empty_param_groups`       transformers 43711           without DeepSpeed
    :mod:`.evaluation`               trl 3337, 4010, 4669         in trl 0.18.0 to 0.21.0, and from 0.27.1
    :mod:`.evaluation_remainder`     none found                   where TRL's sampler repeats nothing: trl 0.14.0
    :mod:`.resuming`                 transformers 34631           from Transformers 4.47.0
    :mod:`.train_sampler`            reported downstream alone    from trl 0.17.0; with Transformers before 4.52.1
    :mod:`.lora_checkpointing`       trl 3150, 3089               in trl 0.16.0 to 0.21.0, and from 0.26.0
    :mod:`.zero3_lora_checkpointing` trl 2514                     from trl 1.9.0, DeepSpeed 0.19.3; outside of
                                                                  ZeRO-3
    :mod:`.zero3_biases`             deepspeed 7435               from DeepSpeed 0.17.3; outside of ZeRO-3
    :mod:`.zero3_whole_modules`      deepspeed 7203, 7615         with DeepSpeed before 0.16.5 and from 0.19.3 on, PEFT
                                                                  before 0.14; without ``modules_to_save``
    :mod:`.adapter_loading`          peft 3628                    with PEFT before 0.19 and from 0.20 on
    :mod:`.fsdp_adapter_generation`  trl 4550                     from Transformers 5.0.0; outside of FSDP2
    :mod:`.fsdp_adapter_save`        none found                   outside of FSDP1
    :mod:`.fsdp_gradients`           none found                   outside of FSDP1 ``no_shard``
    :mod:`.fsdp2_grad_norm`          pytorch 170862               outside of FSDP2; from torch 2.10 on
    :mod:`.fsdp_sync_ref_model`      none found                   outside of FSDP1
    :mod:`.fsdp_save`                transformers 30491           where the state dict type is FULL_STATE_DICT
    :mod:`.device_map`               none found                   before trl 0.26.0
    :mod:`.warnings_issued`          none found                   from trl 0.27.0; with Transformers before 5.1.0
    :mod:`.gradient_accumulation`    trl 2617                     from Transformers 4.49.0, but for 5.2.0 to 5.5.3;
                                                                  from 4.48.0 without DeepSpeed
    :mod:`.deepspeed_accumulation`   trl 4631, deepspeed 7718     before DeepSpeed 0.17.6, and from 0.19.6 on
    :mod:`.token_normalizer`         trl 5619, 6439               before trl 0.22.0, and where TRL takes the share
    :mod:`.plain_logprobs`           none found                   but in trl 1.15.0 without Triton
    :mod:`.sampling`                 trl 5783                     from trl 0.27.0
    :mod:`.checkpointed_generation`  none found                   without ``gradient_checkpointing``
    ================================ ============================ ==================================================
    """

    @functools.wraps(trl.GRPOTrainer.__init__)  # type: ignore[misc] # the stack is Any where it is not installed
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
