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
    from pytest_trlcompat.trainers.adapter_loading import AdapterLoadingMixin
    from pytest_trlcompat.trainers.checkpointed_generation import CheckpointedGenerationMixin
    from pytest_trlcompat.trainers.deepspeed_accumulation import DeepSpeedAccumulationMixin
    from pytest_trlcompat.trainers.deepspeed_evaluation import DeepSpeedEvaluationMixin
    from pytest_trlcompat.trainers.deepspeed_hooks import DeepSpeedHooksMixin, PPODeepSpeedHooksMixin
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
    from pytest_trlcompat.trainers.fsdp_sync_ref_model import FSDPSyncRefModelCallback, FSDPSyncRefModelMixin
    from pytest_trlcompat.trainers.gradient_accumulation import GradientAccumulationMixin
    from pytest_trlcompat.trainers.grpo import GRPOTrainer
    from pytest_trlcompat.trainers.logits_to_keep import LogitsToKeepMixin
    from pytest_trlcompat.trainers.lora_checkpointing import LoraCheckpointingMixin
    from pytest_trlcompat.trainers.plain_logprobs import PlainLogProbsMixin
    from pytest_trlcompat.trainers.ppo import PPOConfig as PPOConfig
    from pytest_trlcompat.trainers.ppo import PPOTrainer as PPOTrainer
    from pytest_trlcompat.trainers.ppo_accelerator import PPOAcceleratorMixin
    from pytest_trlcompat.trainers.ppo_accumulation import PPOAccumulationMixin
    from pytest_trlcompat.trainers.ppo_adapter_reference import PPOAdapterReferenceMixin
    from pytest_trlcompat.trainers.ppo_fsdp import PPOFSDPMixin
    from pytest_trlcompat.trainers.ppo_newer_trainer import PPONewerTrainerMixin
    from pytest_trlcompat.trainers.ppo_save import PPOSaveMixin
    from pytest_trlcompat.trainers.resuming import ResumingMixin
    from pytest_trlcompat.trainers.sampling import SamplingMixin
    from pytest_trlcompat.trainers.token_normalizer import TokenNormalizerMixin
    from pytest_trlcompat.trainers.train_sampler import TrainSamplerMixin
    from pytest_trlcompat.trainers.warnings_issued import WarningsIssuedMixin
    from pytest_trlcompat.trainers.zero3_biases import ZeRO3BiasesMixin
    from pytest_trlcompat.trainers.zero3_generation import ZeRO3GenerationMixin
    from pytest_trlcompat.trainers.zero3_lora_checkpointing import ZeRO3LoraCheckpointingMixin
    from pytest_trlcompat.trainers.zero3_whole_modules import ZeRO3WholeModulesMixin

# Without PPOTrainer and PPOConfig, which some releases have not: importing everything must not fail for that.
__all__ = [
    "AdapterLoadingMixin",
    "CheckpointedGenerationMixin",
    "DeepSpeedAccumulationMixin",
    "DeepSpeedEvaluationMixin",
    "DeepSpeedHooksMixin",
    "EmptyParamGroupsMixin",
    "EvaluationMixin",
    "EvaluationRemainderMixin",
    "FSDP2GradNormMixin",
    "FSDPAdapterGenerationMixin",
    "FSDPAdapterSaveMixin",
    "FSDPGenerationMixin",
    "FSDPGradientsMixin",
    "FSDPReferenceModelMixin",
    "FSDPSaveMixin",
    "FSDPSyncRefModelCallback",
    "FSDPSyncRefModelMixin",
    "GRPOTrainer",
    "GradientAccumulationMixin",
    "LogitsToKeepMixin",
    "LoraCheckpointingMixin",
    "OneDevicePerRankMixin",
    "PPOAcceleratorMixin",
    "PPOAccumulationMixin",
    "PPOAdapterReferenceMixin",
    "PPODeepSpeedHooksMixin",
    "PPOFSDPMixin",
    "PPONewerTrainerMixin",
    "PPOSaveMixin",
    "PlainLogProbsMixin",
    "ResumingMixin",
    "SamplingMixin",
    "TokenNormalizerMixin",
    "TrainSamplerMixin",
    "WarningsIssuedMixin",
    "ZeRO3BiasesMixin",
    "ZeRO3GenerationMixin",
    "ZeRO3LoraCheckpointingMixin",
    "ZeRO3WholeModulesMixin",
]

_MODULES = {
    "AdapterLoadingMixin": "adapter_loading",
    "CheckpointedGenerationMixin": "checkpointed_generation",
    "DeepSpeedAccumulationMixin": "deepspeed_accumulation",
    "DeepSpeedEvaluationMixin": "deepspeed_evaluation",
    "DeepSpeedHooksMixin": "deepspeed_hooks",
    "EmptyParamGroupsMixin": "empty_param_groups",
    "EvaluationMixin": "evaluation",
    "EvaluationRemainderMixin": "evaluation_remainder",
    "FSDP2GradNormMixin": "fsdp2_grad_norm",
    "FSDPAdapterGenerationMixin": "fsdp_adapter_generation",
    "FSDPAdapterSaveMixin": "fsdp_adapter_save",
    "FSDPGenerationMixin": "fsdp_generation",
    "FSDPGradientsMixin": "fsdp_gradients",
    "FSDPReferenceModelMixin": "fsdp_ref_model",
    "FSDPSaveMixin": "fsdp_save",
    "FSDPSyncRefModelCallback": "fsdp_sync_ref_model",
    "FSDPSyncRefModelMixin": "fsdp_sync_ref_model",
    "GRPOTrainer": "grpo",
    "GradientAccumulationMixin": "gradient_accumulation",
    "LogitsToKeepMixin": "logits_to_keep",
    "LoraCheckpointingMixin": "lora_checkpointing",
    "OneDevicePerRankMixin": "device_map",
    "PPOAcceleratorMixin": "ppo_accelerator",
    "PPOAccumulationMixin": "ppo_accumulation",
    "PPOAdapterReferenceMixin": "ppo_adapter_reference",
    "PPOConfig": "ppo",
    "PPODeepSpeedHooksMixin": "deepspeed_hooks",
    "PPOFSDPMixin": "ppo_fsdp",
    "PPONewerTrainerMixin": "ppo_newer_trainer",
    "PPOSaveMixin": "ppo_save",
    "PPOTrainer": "ppo",
    "PlainLogProbsMixin": "plain_logprobs",
    "ResumingMixin": "resuming",
    "SamplingMixin": "sampling",
    "TokenNormalizerMixin": "token_normalizer",
    "TrainSamplerMixin": "train_sampler",
    "WarningsIssuedMixin": "warnings_issued",
    "ZeRO3BiasesMixin": "zero3_biases",
    "ZeRO3GenerationMixin": "zero3_generation",
    "ZeRO3LoraCheckpointingMixin": "zero3_lora_checkpointing",
    "ZeRO3WholeModulesMixin": "zero3_whole_modules",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
