"""Which cures a kind of trainer gets, in the order in which they stand. Imports only the standard library."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["KINDS"]

_ANY = (
    "DeepSpeedAccumulationMixin",
    "DeepSpeedEvaluationMixin",
    "EmptyParamGroupsMixin",
    "ResumingMixin",
    "ZeRO3BiasesMixin",
    "ZeRO3WholeModulesMixin",
    "FSDPSyncRefModelMixin",
    "FSDPReferenceModelMixin",
    "FSDP2GradNormMixin",
    "FSDPSaveMixin",
    "FSDPAdapterSaveMixin",
    "AdapterLoadingMixin",
    "OneDevicePerRankMixin",
)

KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "trainer": _ANY,
        "grpo": (
            "GradientAccumulationMixin",
            "DeepSpeedAccumulationMixin",
            "TokenNormalizerMixin",
            "SamplingMixin",
            "CheckpointedGenerationMixin",
            "PlainLogProbsMixin",
            "LogitsToKeepMixin",
            "FSDPSyncRefModelMixin",
            "FSDPReferenceModelMixin",
            "FSDPGenerationMixin",
            "FSDPAdapterGenerationMixin",
            "ZeRO3GenerationMixin",
            "DeepSpeedHooksMixin",
            "DeepSpeedEvaluationMixin",
            "EmptyParamGroupsMixin",
            "EvaluationMixin",
            "EvaluationRemainderMixin",
            "ResumingMixin",
            "TrainSamplerMixin",
            "LoraCheckpointingMixin",
            "ZeRO3LoraCheckpointingMixin",
            "ZeRO3BiasesMixin",
            "ZeRO3WholeModulesMixin",
            "FSDPGradientsMixin",
            "FSDP2GradNormMixin",
            "FSDPSaveMixin",
            "FSDPAdapterSaveMixin",
            "AdapterLoadingMixin",
            "OneDevicePerRankMixin",
            "WarningsIssuedMixin",
        ),
        "ppo": (
            "PPOAccumulationMixin",
            "PPOSaveMixin",
            "PPOFSDPMixin",
            "PPOAdapterReferenceMixin",
            "PPOAcceleratorMixin",
            "PPONewerTrainerMixin",
            "PPODeepSpeedHooksMixin",
            "EmptyParamGroupsMixin",
            "ZeRO3WholeModulesMixin",
        ),
    }
)
"""Kind of trainer (``grpo`` and ``ppo`` of TRL, ``trainer`` any other of Transformers') to the names of its mixins."""
