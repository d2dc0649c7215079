"""Made by `python -m pytest_trlcompat.trainers.stub` from what the modules export; do not edit."""

from .adapter_loading import AdapterLoadingMixin as AdapterLoadingMixin
from .checkpointed_generation import CheckpointedGenerationMixin as CheckpointedGenerationMixin
from .compose import cured as cured
from .deepspeed_accumulation import DeepSpeedAccumulationMixin as DeepSpeedAccumulationMixin
from .deepspeed_evaluation import DeepSpeedEvaluationMixin as DeepSpeedEvaluationMixin
from .deepspeed_hooks import DeepSpeedHooksMixin as DeepSpeedHooksMixin
from .deepspeed_hooks import PPODeepSpeedHooksMixin as PPODeepSpeedHooksMixin
from .device_map import OneDevicePerRankMixin as OneDevicePerRankMixin
from .empty_param_groups import EmptyParamGroupsMixin as EmptyParamGroupsMixin
from .errors import CureError as CureError
from .evaluation import EvaluationMixin as EvaluationMixin
from .evaluation_remainder import EvaluationRemainderMixin as EvaluationRemainderMixin
from .fsdp2_grad_norm import FSDP2GradNormMixin as FSDP2GradNormMixin
from .fsdp2_outputs import FSDP2OutputsMixin as FSDP2OutputsMixin
from .fsdp_adapter_generation import FSDPAdapterGenerationMixin as FSDPAdapterGenerationMixin
from .fsdp_adapter_save import FSDPAdapterSaveMixin as FSDPAdapterSaveMixin
from .fsdp_generation import FSDPGenerationMixin as FSDPGenerationMixin
from .fsdp_gradients import FSDPGradientsMixin as FSDPGradientsMixin
from .fsdp_ref_model import FSDPReferenceModelMixin as FSDPReferenceModelMixin
from .fsdp_save import FSDPSaveMixin as FSDPSaveMixin
from .fsdp_sync_ref_model import FSDPSyncRefModelCallback as FSDPSyncRefModelCallback
from .fsdp_sync_ref_model import FSDPSyncRefModelMixin as FSDPSyncRefModelMixin
from .gradient_accumulation import GradientAccumulationMixin as GradientAccumulationMixin
from .grpo import GRPOTrainer as GRPOTrainer
from .logits_to_keep import LogitsToKeepMixin as LogitsToKeepMixin
from .lora_checkpointing import LoraCheckpointingMixin as LoraCheckpointingMixin
from .plain_logprobs import PlainLogProbsMixin as PlainLogProbsMixin
from .ppo import PPOConfig as PPOConfig
from .ppo import PPOTrainer as PPOTrainer
from .ppo_accelerator import PPOAcceleratorMixin as PPOAcceleratorMixin
from .ppo_accumulation import PPOAccumulationMixin as PPOAccumulationMixin
from .ppo_adapter_reference import PPOAdapterReferenceMixin as PPOAdapterReferenceMixin
from .ppo_fsdp import PPOFSDPMixin as PPOFSDPMixin
from .ppo_newer_trainer import PPONewerTrainerMixin as PPONewerTrainerMixin
from .ppo_save import PPOSaveMixin as PPOSaveMixin
from .resuming import ResumingMixin as ResumingMixin
from .sampling import SamplingMixin as SamplingMixin
from .token_normalizer import TokenNormalizerMixin as TokenNormalizerMixin
from .train_sampler import TrainSamplerMixin as TrainSamplerMixin
from .warnings_issued import WarningsIssuedMixin as WarningsIssuedMixin
from .zero3_biases import ZeRO3BiasesMixin as ZeRO3BiasesMixin
from .zero3_generation import ZeRO3GenerationMixin as ZeRO3GenerationMixin
from .zero3_lora_checkpointing import ZeRO3LoraCheckpointingMixin as ZeRO3LoraCheckpointingMixin
from .zero3_whole_modules import ZeRO3WholeModulesMixin as ZeRO3WholeModulesMixin

__all__: list[str]
