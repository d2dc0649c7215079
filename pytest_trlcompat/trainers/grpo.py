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
    """``trl.GRPOTrainer`` of whichever release is installed, with known bugs cured.

    Takes what ``trl.GRPOTrainer`` takes, is one, and behaves like it elsewhere. What is cured, where and by which of
    its bases: ``docs/cures.md``.
    """

    @functools.wraps(trl.GRPOTrainer.__init__)  # type: ignore[misc] # the stack is Any where it is not installed
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
