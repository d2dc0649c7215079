"""Which cures a kind of trainer gets, in the order in which they stand. Imports only the standard library."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["KINDS", "TRAINERS", "kind_named"]

_ANY = (
    "TrainerAccumulationMixin",
    "DeepSpeedAccumulationMixin",
    "DeepSpeedEvaluationMixin",
    "EmptyParamGroupsMixin",
    "DecayedNormsMixin",
    "EvaluationRemainderMixin",
    "ResumingMixin",
    "ResumedEpochsMixin",
    "TrainSamplerMixin",
    "ShiftedCountMixin",
    "ZeRO3BiasesMixin",
    "ZeRO3WholeModulesMixin",
    "ZeRO3MixedDtypesMixin",
    "AdapterCheckpointingMixin",
    "DDPAdapterCheckpointingMixin",
    "FSDPCheckpointedCacheMixin",
    "PrecomputedReferenceMixin",
    "KTOEvaluationMixin",
    "LigerSettingsMixin",
    "LigerGradientsMixin",
    "LoggedMetricsMixin",
    "AssistantPrefixMixin",
    "AbsolutePositionsMixin",
    "OwnLogitsMixin",
    "VLLMSyncMixin",
    "VLLMRestartMixin",
    "FSDPSyncRefModelMixin",
    "FSDP2OutputsMixin",
    "ReferenceOfPolicyMixin",
    "FSDPReferenceModelMixin",
    "FSDPTeacherMixin",
    "FSDP2GradNormMixin",
    "FSDPSaveMixin",
    "FSDPAdapterSaveMixin",
    "AdapterLoadingMixin",
    "AdapterSeedMixin",
    "OneDevicePerRankMixin",
)

KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "trainer": _ANY,
        "grpo": (
            "GradientAccumulationMixin",
            "DeepSpeedAccumulationMixin",
            "LigerNormalizerMixin",
            "TokenNormalizerMixin",
            "LigerSettingsMixin",
            "EntropyBonusMixin",
            "ScaleRewardsMixin",
            "AssistantPrefixMixin",
            "AbsolutePositionsMixin",
            "OwnLogitsMixin",
            "LoggedMetricsMixin",
            "SamplingMixin",
            "CheckpointedGenerationMixin",
            "AdapterReferenceMixin",
            "VLLMSyncMixin",
            "VLLMRestartMixin",
            "PlainLogProbsMixin",
            "LogitsToKeepMixin",
            "Float32LogProbsMixin",
            "FSDPSyncRefModelMixin",
            "FSDP2OutputsMixin",
            "ReferenceOfPolicyMixin",
            "FSDPReferenceModelMixin",
            "FSDPGenerationMixin",
            "FSDPAdapterGenerationMixin",
            "FSDPOffloadGenerationMixin",
            "ZeRO3GenerationMixin",
            "ZeRO3FusedHeadMixin",
            "DeepSpeedHooksMixin",
            "DeepSpeedEvaluationMixin",
            "EmptyParamGroupsMixin",
            "DecayedNormsMixin",
            "EvaluationMixin",
            "EvaluationRemainderMixin",
            "ResumingMixin",
            "ResumedEpochsMixin",
            "TrainSamplerMixin",
            "LoraCheckpointingMixin",
            "AdapterCheckpointingMixin",
            "ZeRO3LoraCheckpointingMixin",
            "ZeRO3BiasesMixin",
            "ZeRO3WholeModulesMixin",
            "ZeRO3MixedDtypesMixin",
            "DDPAdapterCheckpointingMixin",
            "FSDPCheckpointedCacheMixin",
            "FSDPGradientsMixin",
            "FSDP2GradNormMixin",
            "FSDPSaveMixin",
            "FSDPAdapterSaveMixin",
            "AdapterLoadingMixin",
            "AdapterSeedMixin",
            "OneDevicePerRankMixin",
            "WarningsIssuedMixin",
        ),
        "ppo": (
            "PPOOptimizerStepsMixin",
            "PPOAccumulationMixin",
            "PPOGradNormMixin",
            "PPOEosCountMixin",
            "PPOObjectiveEntropyMixin",
            "PPOSaveMixin",
            "PPOFSDPMixin",
            "PPOAdapterReferenceMixin",
            "PPOAcceleratorMixin",
            "PPONewerTrainerMixin",
            "PPODeepSpeedHooksMixin",
            "EmptyParamGroupsMixin",
            "DecayedNormsMixin",
            "ZeRO3WholeModulesMixin",
        ),
        "rloo": ("FSDPAdapterGenerationMixin", "DeepSpeedHooksMixin", *_ANY),
        "distillation": ("FSDPAdapterGenerationMixin", *_ANY),
        "first_rloo": (
            "PPOOptimizerStepsMixin",
            "PPOGradNormMixin",
            "PPOEosCountMixin",
            "PPONewerTrainerMixin",
            *_ANY,
        ),
    }
)
"""Kind of trainer to the names of its mixins: ``grpo``, ``ppo`` and ``distillation`` of TRL, ``rloo`` its RLOO from
0.22 on, ``first_rloo`` that of until 0.21, whose training loop is PPO's, and ``trainer`` any other of Transformers'."""

TRAINERS: Mapping[str, str] = MappingProxyType(
    {
        "grpo": "GRPOTrainer",
        "ppo": "PPOTrainer",
        "sft": "SFTTrainer",
        "dpo": "DPOTrainer",
        "reward": "RewardTrainer",
        "rloo": "RLOOTrainer",
        "kto": "KTOTrainer",
        "orpo": "ORPOTrainer",
        "cpo": "CPOTrainer",
        "bco": "BCOTrainer",
        "prm": "PRMTrainer",
        "gkd": "GKDTrainer",
        "distillation": "DistillationTrainer",
        "online-dpo": "OnlineDPOTrainer",
        "nash-md": "NashMDTrainer",
        "xpo": "XPOTrainer",
        "trainer": "YourTrainer",
    }
)
"""What people call a trainer to the name of TRL's class; ``trainer`` is any other, also a user's own."""


def kind_named(trainer: str) -> str:
    """The kind of one of :data:`TRAINERS`, or of what :func:`~pytest_trlcompat.catalog.issue.measured_with` names."""
    return trainer if trainer in KINDS else "trainer"
