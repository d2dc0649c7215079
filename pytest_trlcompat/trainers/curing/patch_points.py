"""Every name of upstream's that a cure changes, overrides, or calls although it is not public, and where it exists.

``nox -s points`` holds the table against each release in the locks. At run time a name that should be there and is not
is a ``CureError``, before a training begins: upstream has renamed what the cure changes, and the cure would do nothing,
without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pytest_trlcompat.trainers.curing.patching import PatchPoint

__all__ = ["POINTS", "all_points", "of", "ppo", "ppo_method"]

_GRPO = "trl.trainer.grpo_trainer:"
_TRAINER = "transformers.trainer:Trainer."
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload."


def _grpo(name: str, releases: str = ">=0.14") -> PatchPoint:
    return PatchPoint(f"{_GRPO}{name}", releases)


def _trainer(name: str) -> PatchPoint:
    return PatchPoint(f"{_TRAINER}{name}")


GRPO_CONSTRUCTOR = _grpo("GRPOTrainer.__init__")
REFERENCE_CONSTRUCTORS = (
    GRPO_CONSTRUCTOR,
    PatchPoint("trl.trainer.dpo_trainer:DPOTrainer.__init__", ">=0.29"),
    PatchPoint("trl.trainer.rloo_trainer:RLOOTrainer.__init__", ">=0.22"),
    PatchPoint("trl.experimental.kto.kto_trainer:KTOTrainer.__init__", ">=1.2,<1.8"),
    PatchPoint("trl.trainer.kto_trainer:KTOTrainer.__init__", ">=1.8"),
)
"""Of trainers that read their reference model from where the policy was read from."""
GENERATION = _grpo("unwrap_model_for_generation")
PREPARE_INPUTS = _grpo("GRPOTrainer._prepare_inputs")
CHAT_TEMPLATE = _grpo("maybe_apply_chat_template", ">=0.14,<0.15")  # right from then on
COMPUTE_LOSS = _grpo("GRPOTrainer.compute_loss")
GRPO_LOSS = _grpo("GRPOTrainer._compute_loss", ">=0.17")
CREATE_MODEL = _grpo("create_model_from_path", ">=0.26")
ADD_FUSED_HEAD = _grpo("add_fused_lm_head", ">=1.15")
PREPARE_FSDP = _grpo("prepare_fsdp", ">=0.18")
# Beneath what tokenizers and processors call ``apply_chat_template``; TRL renders by it from 0.25 on.
RENDER_OF_TOKENIZERS = PatchPoint("transformers.tokenization_utils_base:render_jinja_template", ">=4.56")
RENDER_OF_PROCESSORS = PatchPoint("transformers.processing_utils:render_jinja_template", ">=4.56")
VLLM_PARAMETERS = PatchPoint("trl.generation.vllm_generation:VLLMGeneration._iter_named_params", ">=1.11")
VLLM_SYNC = PatchPoint("trl.generation.vllm_generation:VLLMGeneration.sync_weights", ">=0.28,<1.11")
VLLM_CLIENT = PatchPoint("trl.generation.vllm_client:VLLMClient.generate", ">=1.11")
VLLM_CHAT = PatchPoint("trl.generation.vllm_client:VLLMClient.chat", ">=1.11")
VLLM_GENERATE = PatchPoint("trl.generation.vllm_generation:VLLMGeneration.generate", ">=1.11")
VLLM_OF_TRAINERS = (
    _grpo("GRPOTrainer._move_model_to_vllm", ">=0.15,<0.28"),
    PatchPoint("trl.trainer.rloo_trainer:RLOOTrainer._move_model_to_vllm", ">=0.22,<0.28"),
)
HASH_MODULE = PatchPoint("trl.trainer.dpo_trainer:hash_module", ">=0.29")
PARAMETER_NAMES = PatchPoint("transformers.trainer:get_parameter_names", "<4.53")  # asked for norms' names from then on
# TRL 1.15 has models return log-probabilities.
SELECTIVE_LOG_SOFTMAX = _grpo("selective_log_softmax", ">=0.15,<1.15")
SELECTIVE_LOG_SOFTMAX_OF_UTILS = PatchPoint("trl.trainer.utils:selective_log_softmax", ">=0.15,<1.15")
ADD_HOOKS = PatchPoint("trl.models.utils:add_hooks")
REMOVE_HOOKS = PatchPoint("trl.models.utils:remove_hooks")
GATHER = PatchPoint("accelerate.accelerator:Accelerator.gather")
CLIP = PatchPoint("accelerate.accelerator:Accelerator.clip_grad_norm_")
ACCELERATOR = PatchPoint("accelerate.accelerator:Accelerator.__init__")
GET_STATE_DICT = PatchPoint("accelerate.accelerator:Accelerator.get_state_dict")
PREPARE_FSDP2 = PatchPoint("accelerate.utils.fsdp_utils:fsdp2_prepare_model", ">=1.6")
PREPARE_FSDP2_CALLED = PatchPoint("accelerate.accelerator:fsdp2_prepare_model", ">=1.6")  # by Accelerator.prepare
# Right from 0.17.3 on, so that nothing is changed there.
ZERO3_LINEAR_BACKWARD = PatchPoint("deepspeed.runtime.zero.linear:LinearFunctionForZeroStage3.backward", "<0.17.3")
ZERO3_GATHER = PatchPoint(  # right from 0.19.3 on
    "deepspeed.runtime.zero.partition_parameters:Init._allgather_params_coalesced", "<0.19.3"
)
REGISTER_EXTERNAL = PatchPoint("deepspeed.runtime.zero.partition_parameters:register_external_parameter")
OLD_REGISTER = PatchPoint(f"{_OFFLOAD}_register_hooks_recursively", "<0.16.4")
NEW_REGISTER = PatchPoint(f"{_OFFLOAD}_register_deepspeed_module", ">=0.16.4")
# Before 0.14 the wrapper gives away no attribute of what it wraps.
PEFT_WRAPPER = PatchPoint("peft.utils.other:AuxiliaryTrainingWrapper.__getattr__", ">=0.15")
PEFT_OLD_WRAPPER = PatchPoint("peft.utils.other:ModulesToSaveWrapper.__getattr__", ">=0.14,<0.15")
DISABLE_ADAPTER = PatchPoint("peft.peft_model:PeftModel.disable_adapter")
PEFT_SHARDING = PatchPoint("peft.utils.save_and_load:_maybe_shard_state_dict_for_tp", ">=0.19")

# FSDP1 is frozen, and has no public way to free what it has gathered or to reach a shard.
FSDP1_LAZY_INIT = PatchPoint("torch.distributed.fsdp._runtime_utils:_lazy_init")
FSDP1_UNSHARD = PatchPoint("torch.distributed.fsdp._runtime_utils:_unshard")
FSDP1_RESHARD = PatchPoint("torch.distributed.fsdp._runtime_utils:_reshard")
FSDP1_WRITE_BACK = PatchPoint("torch.distributed.fsdp._flat_param:FlatParamHandle._writeback_orig_params")
FSDP1_RESET_GRADIENTS = PatchPoint(
    "torch.distributed.fsdp._flat_param:FlatParamHandle._reset_flat_param_grad_info_if_needed"
)
_FSDP1_ROOT = (FSDP1_LAZY_INIT, FSDP1_UNSHARD, FSDP1_RESHARD, FSDP1_RESET_GRADIENTS)

_SAVE_MODEL, _SAVE_CHECKPOINT = _trainer("save_model"), _trainer("_save_checkpoint")
_LOAD, _TRAIN, _EVALUATE = _trainer("_load_from_checkpoint"), _trainer("train"), _trainer("evaluate")
_ACCELERATOR_MADE = _trainer("create_accelerator_and_postprocess")
_TRAINING_STEP = _trainer("training_step")
_CREATE_OPTIMIZER = _trainer("create_optimizer")
_WRAP_MODEL = _trainer("_wrap_model")


def _of_ppo(name: str) -> tuple[PatchPoint, ...]:
    """A name of PPO's module, wherever a release of TRL keeps it."""
    return (
        PatchPoint(f"trl.trainer.ppov2_trainer:{name}", "<0.12"),
        PatchPoint(f"trl.trainer.ppo_trainer:{name}", ">=0.12,<0.26"),
        PatchPoint(f"trl.experimental.ppo.ppo_trainer:{name}", ">=0.26,<1.13"),
    )


_PPO_METHODS = {"<0.12": "PPOv2Trainer", ">=0.12,<0.26": "PPOTrainer", ">=0.26,<1.13": "PPOTrainer"}


def _of_ppo_trainer(name: str) -> tuple[PatchPoint, ...]:
    return tuple(
        PatchPoint(f"{point.module}:{_PPO_METHODS[point.releases]}.{name}", point.releases) for point in _of_ppo("")
    )


_NULL_REFERENCE = (  # without it, TRL asks for a reference model where it trains an adapter
    PatchPoint("trl.trainer.ppo_trainer:PPOTrainer.null_ref_context", ">=0.13,<0.26"),
    PatchPoint("trl.experimental.ppo.ppo_trainer:PPOTrainer.null_ref_context", ">=0.26,<1.13"),
)


POINTS: Mapping[str, tuple[PatchPoint, ...]] = {
    "AdapterCheckpointingMixin": (_WRAP_MODEL,),
    "AdapterLoadingMixin": (_LOAD, PEFT_SHARDING),
    "AdapterReferenceMixin": (
        GRPO_CONSTRUCTOR,
        PREPARE_INPUTS,
        COMPUTE_LOSS,
        DISABLE_ADAPTER,
        _grpo("GRPOTrainer._get_per_token_logps", ">=0.15,<0.20"),
        _grpo("GRPOTrainer._get_per_token_logps_and_entropies", ">=0.20"),
    ),
    "AdapterSeedMixin": (),
    "AroundGeneration": (PREPARE_INPUTS, COMPUTE_LOSS),
    "AbsolutePositionsMixin": (),
    "AssistantPrefixMixin": (
        _grpo("GRPOTrainer._generate_single_turn", ">=0.25,<0.29.1"),
        _grpo("GRPOTrainer._tokenize_prompts", ">=0.29.1"),
        RENDER_OF_TOKENIZERS,
        RENDER_OF_PROCESSORS,
        COMPUTE_LOSS,
        CHAT_TEMPLATE,
    ),
    "CheckpointNamesMixin": (_LOAD, _trainer("_load_best_model")),
    "CheckpointedGenerationMixin": (GENERATION,),
    "Cure": (_TRAIN,),
    "DDPAdapterCheckpointingMixin": (_WRAP_MODEL,),
    "DecayedNormsMixin": (_trainer("get_decay_parameter_names"), PARAMETER_NAMES),
    "DeepSpeedAccumulationMixin": (_TRAINING_STEP,),
    "DeepSpeedEvaluationMixin": (_trainer("evaluation_loop"), _TRAIN),
    "DeepSpeedHooksMixin": (ADD_HOOKS, OLD_REGISTER, NEW_REGISTER),
    "EmptyParamGroupsMixin": (_CREATE_OPTIMIZER,),
    "EntropyBonusMixin": (
        COMPUTE_LOSS,
        GRPO_LOSS,
        GATHER,
        _grpo("GRPOTrainer._get_per_token_logps_and_entropies", ">=0.20"),
    ),
    "EvaluationMixin": (
        _EVALUATE,
        _trainer("prediction_step"),
        _grpo("GRPOTrainer.log"),
        PREPARE_INPUTS,
        COMPUTE_LOSS,
    ),
    "EvaluationRemainderMixin": (
        _trainer("get_eval_dataloader"),
        _trainer("evaluation_loop"),
        _grpo("GRPOTrainer._get_eval_sampler", ">=0.15"),
    ),
    "FSDP2GradNormMixin": (_TRAIN, CLIP),
    "FSDP2OutputsMixin": (_TRAIN, _trainer("evaluation_loop"), PREPARE_FSDP, PREPARE_FSDP2, PREPARE_FSDP2_CALLED),
    "FSDPAdapterGenerationMixin": (GENERATION,),
    "FSDPAdapterSaveMixin": (_SAVE_MODEL, _SAVE_CHECKPOINT, _LOAD),
    "FSDPCheckpointedCacheMixin": (),
    "FSDPGenerationMixin": (GENERATION, *_FSDP1_ROOT),
    "FSDPGradientsMixin": (GENERATION, FSDP1_RESET_GRADIENTS),
    "FSDPOffloadGenerationMixin": (GENERATION,),
    "FSDPReferenceModelMixin": (PREPARE_FSDP, PREPARE_FSDP2),
    "FSDPSaveMixin": (_SAVE_MODEL, GET_STATE_DICT),
    "FSDPSyncRefModelMixin": (
        PatchPoint("trl.trainer.callbacks:SyncRefModelCallback.on_step_end", ">=0.12"),
        FSDP1_RESHARD,
        FSDP1_WRITE_BACK,
    ),
    "FSDPTeacherMixin": (PREPARE_FSDP2,),
    "Float32LogProbsMixin": (SELECTIVE_LOG_SOFTMAX, SELECTIVE_LOG_SOFTMAX_OF_UTILS),
    "GradientAccumulationMixin": (_ACCELERATOR_MADE,),
    "KTOEvaluationMixin": (
        PatchPoint("trl.experimental.kto.kto_trainer:KTOTrainer._prepare_dataset", ">=1.3,<1.8"),
        PatchPoint("trl.trainer.kto_trainer:KTOTrainer._prepare_dataset", ">=1.8"),
    ),
    "LigerGradientsMixin": (_TRAINING_STEP,),
    "LigerNormalizerMixin": (
        COMPUTE_LOSS,
        _grpo("GRPOTrainer.compute_liger_loss", ">=0.18,<1.13"),
        PatchPoint(
            "liger_kernel.chunked_loss.fused_linear_ppo:LigerFusedLinearPPOBase._compute_dapo_normalizer", ">=0.6.4"
        ),
    ),
    "LigerSettingsMixin": (),
    "LogStartTimeMixin": (_trainer("log"),),
    "LoggedMetricsMixin": (
        _grpo("GRPOTrainer._calculate_rewards", ">=1.0,<1.14"),
        PatchPoint("trl.trainer.rloo_trainer:RLOOTrainer._calculate_rewards", ">=1.0,<1.14"),
    ),
    "LogitsToKeepMixin": (
        _grpo("GRPOTrainer._get_per_token_logps", ">=0.15,<0.20"),
        COMPUTE_LOSS,
        _trainer("_prepare_input"),
    ),
    "LoraCheckpointingMixin": (GENERATION, _WRAP_MODEL),
    "OneDevicePerRankMixin": (CREATE_MODEL,),
    "PPOAcceleratorMixin": (ACCELERATOR,),
    "PPOAccumulationMixin": _of_ppo_trainer("train"),
    "PPOAdapterReferenceMixin": _NULL_REFERENCE,
    "PPODeepSpeedHooksMixin": (
        ADD_HOOKS,
        OLD_REGISTER,
        NEW_REGISTER,
        *_of_ppo_trainer("train"),
        *_of_ppo_trainer("generate_completions"),
    ),
    "PPOEosCountMixin": (_trainer("log"),),
    "PPOFSDPMixin": (
        *_of_ppo("PolicyAndValueWrapper.__init__"),
        *_of_ppo("unwrap_model_for_generation"),
        *_of_ppo("get_reward"),
        *_of_ppo_trainer("train"),
        *_of_ppo_trainer("generate_completions"),
        *_FSDP1_ROOT,
    ),
    "PPOGradNormMixin": _of_ppo_trainer("train"),
    "PPONewerTrainerMixin": (_SAVE_CHECKPOINT,),
    "PPOObjectiveEntropyMixin": (*_of_ppo("masked_whiten"), *_of_ppo_trainer("train"), _trainer("log")),
    "PPOOptimizerStepsMixin": (*_of_ppo_trainer("train"), _trainer("log")),
    "PPOSaveMixin": (
        *_of_ppo_trainer("save_model"),
        _SAVE_MODEL,
        GET_STATE_DICT,
        _trainer("_save"),
        _trainer("create_model_card"),
    ),
    "PlainLogProbsMixin": (_grpo("GRPOTrainer._get_per_token_logps_and_entropies", ">=0.20"),),
    "PrecomputedReferenceMixin": (
        HASH_MODULE,
        PatchPoint("trl.trainer.dpo_trainer:DPOTrainer._precompute_ref_logps", ">=0.29"),
        PatchPoint("trl.trainer.kto_trainer:KTOTrainer._precompute_ref_logps", ">=1.8"),
    ),
    "ReferenceOfPolicyMixin": REFERENCE_CONSTRUCTORS,
    "ResumedEpochsMixin": (_trainer("_get_train_sampler"),),
    "ResumingMixin": (_trainer("_load_rng_state"),),
    "SamplingMixin": (GENERATION,),
    "ScaleRewardsMixin": (_grpo("GRPOTrainer._generate_and_score_completions", ">=0.16"),),
    "ScaledBackward": (_TRAINING_STEP, _trainer("compute_loss")),
    "TokenNormalizerMixin": (
        GRPO_LOSS,
        _grpo("GRPOTrainer._generate_and_score_completions", ">=0.16"),
        COMPUTE_LOSS,
    ),
    "OwnLogitsMixin": (ADD_FUSED_HEAD, PatchPoint("trl.trainer.utils:FusedCausalLMOutput", ">=1.15")),
    "ShiftedCountMixin": (),
    "TrainSamplerMixin": (_trainer("_get_train_sampler"),),
    "TrainerAccumulationMixin": (_TRAINING_STEP,),
    "VLLMImagesMixin": (PatchPoint("trl.generation.vllm_generation:VLLMGeneration.generate", ">=0.28"), VLLM_CLIENT),
    "VLLMRestartMixin": (VLLM_CLIENT, VLLM_CHAT, VLLM_GENERATE),
    "VLLMSyncMixin": (VLLM_PARAMETERS, VLLM_SYNC, *VLLM_OF_TRAINERS, PREPARE_INPUTS, FSDP1_LAZY_INIT),
    "WarningsIssuedMixin": (),
    "ZeRO3BiasesMixin": (_TRAIN, ZERO3_LINEAR_BACKWARD),
    "ZeRO3FusedHeadMixin": (ADD_FUSED_HEAD, REGISTER_EXTERNAL),
    "ZeRO3GenerationMixin": (GENERATION, ADD_HOOKS, REMOVE_HOOKS),
    "ZeRO3LoraCheckpointingMixin": (),
    "ZeRO3MixedDtypesMixin": (_TRAIN, _EVALUATE, ZERO3_GATHER),
    "ZeRO3WholeModulesMixin": (_TRAIN, _EVALUATE, PEFT_WRAPPER, PEFT_OLD_WRAPPER),
}
"""Mixin, or what mixins have in common, to the points of upstream that it depends on."""


def of(mixin: str) -> tuple[PatchPoint, ...]:
    """The points of one mixin, by its class name; none for a class that is not in the table."""
    return POINTS.get(mixin, ())


def all_points() -> Iterator[tuple[str, PatchPoint]]:
    """Each pair of a mixin and a point."""
    for mixin, points in POINTS.items():
        yield from ((mixin, point) for point in points)


def ppo(name: str, module: str) -> PatchPoint:
    """The point of that name in the module where the installed TRL keeps PPO."""
    return next(point for point in _of_ppo(name) if point.module == module)


def ppo_method(name: str, module: str) -> PatchPoint:
    """The point of that method of PPO's trainer, in the module where the installed TRL keeps it."""
    return next(point for point in _of_ppo_trainer(name) if point.module == module)
