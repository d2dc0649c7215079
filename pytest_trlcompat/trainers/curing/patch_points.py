"""Names of upstream's that several cures change, override, or call although they are not public, and where they exist.

A cure declares all that it depends on in ``_points``; what no other depends on is named in its module.
``nox -s points`` holds them against each release in the locks. At run time a name that should be there and is not is a
``CureError``, before a training begins: upstream has renamed what the cure changes, and the cure would do nothing,
without a word.
"""

from __future__ import annotations

from pytest_trlcompat.trainers.curing.patching import PatchPoint

__all__ = ["Points", "in_grpo", "in_ppo", "ppo", "ppo_method", "ppo_methods", "trainer_method"]


Points = tuple[PatchPoint, ...]
"""What a cure declares."""


def in_grpo(name: str, releases: str = ">=0.14") -> PatchPoint:
    """A name of the module of TRL's GRPO trainer."""
    return PatchPoint(f"trl.trainer.grpo_trainer:{name}", releases)


def trainer_method(name: str) -> PatchPoint:
    """A method of ``transformers.Trainer`` that every release has."""
    return PatchPoint(f"transformers.trainer:Trainer.{name}")


GRPO_CONSTRUCTOR = in_grpo("GRPOTrainer.__init__")
GENERATION = in_grpo("unwrap_model_for_generation")
GENERATE_AND_SCORE = in_grpo("GRPOTrainer._generate_and_score_completions", ">=0.16")
PREPARE_INPUTS = in_grpo("GRPOTrainer._prepare_inputs")
COMPUTE_LOSS = in_grpo("GRPOTrainer.compute_loss")
GRPO_LOSS = in_grpo("GRPOTrainer._compute_loss", ">=0.17")
PER_TOKEN_LOGPS = in_grpo("GRPOTrainer._get_per_token_logps", ">=0.15,<0.20")
PER_TOKEN_LOGPS_AND_ENTROPIES = in_grpo("GRPOTrainer._get_per_token_logps_and_entropies", ">=0.20")
ADD_FUSED_HEAD = in_grpo("add_fused_lm_head", ">=1.15")
PREPARE_FSDP = in_grpo("prepare_fsdp", ">=0.18")
VLLM_CLIENT = PatchPoint("trl.generation.vllm_client:VLLMClient.generate", ">=1.11")
ADD_HOOKS = PatchPoint("trl.models.utils:add_hooks")
GET_STATE_DICT = PatchPoint("accelerate.accelerator:Accelerator.get_state_dict")
PREPARE_FSDP2 = PatchPoint("accelerate.utils.fsdp_utils:fsdp2_prepare_model", ">=1.6")

# FSDP1 is frozen, and has no public way to free what it has gathered or to reach a shard.
FSDP1_LAZY_INIT = PatchPoint("torch.distributed.fsdp._runtime_utils:_lazy_init")
FSDP1_RESHARD = PatchPoint("torch.distributed.fsdp._runtime_utils:_reshard")
FSDP1_RESET_GRADIENTS = PatchPoint(
    "torch.distributed.fsdp._flat_param:FlatParamHandle._reset_flat_param_grad_info_if_needed"
)
FSDP1_ROOT = (
    FSDP1_LAZY_INIT,
    PatchPoint("torch.distributed.fsdp._runtime_utils:_unshard"),
    FSDP1_RESHARD,
    FSDP1_RESET_GRADIENTS,
)

SAVE_MODEL, SAVE_CHECKPOINT = trainer_method("save_model"), trainer_method("_save_checkpoint")
LOAD, TRAIN, EVALUATE = trainer_method("_load_from_checkpoint"), trainer_method("train"), trainer_method("evaluate")
TRAINING_STEP = trainer_method("training_step")
WRAP_MODEL = trainer_method("_wrap_model")


def in_ppo(name: str) -> Points:
    """A name of PPO's module, wherever a release of TRL keeps it."""
    return (
        PatchPoint(f"trl.trainer.ppov2_trainer:{name}", "<0.12"),
        PatchPoint(f"trl.trainer.ppo_trainer:{name}", ">=0.12,<0.26"),
        PatchPoint(f"trl.experimental.ppo.ppo_trainer:{name}", ">=0.26,<1.13"),
    )


def ppo_methods(name: str) -> Points:
    """A method of PPO's trainer, wherever a release of TRL keeps it, and whatever it calls the trainer."""
    classes = {"trl.trainer.ppov2_trainer": "PPOv2Trainer"}
    return tuple(
        PatchPoint(f"{point.module}:{classes.get(point.module, 'PPOTrainer')}.{name}", point.releases)
        for point in in_ppo("")
    )


def ppo(name: str, module: str) -> PatchPoint:
    """The point of that name in the module where the installed TRL keeps PPO."""
    return next(point for point in in_ppo(name) if point.module == module)


def ppo_method(name: str, module: str) -> PatchPoint:
    """The point of that method of PPO's trainer, in the module where the installed TRL keeps it."""
    return next(point for point in ppo_methods(name) if point.module == module)
