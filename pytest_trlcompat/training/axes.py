"""The axes of a training: what may differ between two trainings, by name, and what to look at to know it.

Complete by construction: the tables below have every name that the libraries export for one of these things, and
``tests/stack/test_axes.py`` fails on one that nobody has placed. DeepSpeed's and Accelerate's keys are in
:mod:`pytest_trlcompat.strategies.config_keys`, and nowhere else. Imports the standard library alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pytest_trlcompat.training.aliases import names_of
from pytest_trlcompat.training.argument_names import ARGUMENTS, words

__all__ = words("""
        ADAPTERS AXES CALLBACKS CLASSES NO_USERS_TRAINER OPTIMIZERS PARALLELISM PARTS TRAINERS Axis axis_named
        look_at trainer_of_class
    """)

PARTS = ("arguments", "model", "adapter", "optimizer", "data", "parallel", "engine", "life")
"""The parts of a training beside its trainer. ``arguments`` are the fields of its config."""

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
        "a2po": "A2POTrainer",
        "align-prop": "AlignPropTrainer",
        "async-distillation": "AsyncDistillationTrainer",
        "async-grpo": "AsyncGRPOTrainer",
        "ddpo": "DDPOTrainer",
        "dppo": "DPPOTrainer",
        "gfpo": "GFPOTrainer",
        "gmpo": "GMPOTrainer",
        "gold": "GOLDTrainer",
        "grpo-replay": "GRPOWithReplayBufferTrainer",
        "iterative-sft": "IterativeSFTTrainer",
        "iw-opd": "IWOPDTrainer",
        "minillm": "MiniLLMTrainer",
        "papo": "PAPOTrainer",
        "sdft": "SDFTTrainer",
        "sdpo": "SDPOTrainer",
        "server-distillation": "ServerDistillationTrainer",
        "ssd": "SSDTrainer",
        "tpo": "TPOTrainer",
        "trainer": "Trainer",
    }
)
"""What people call a trainer to its class, of TRL in some release; ``trainer`` is any other of Transformers'."""

CLASSES: Mapping[str, str] = MappingProxyType(
    {**{name: trainer for trainer, name in TRAINERS.items()}, "PPOv2Trainer": "ppo"}
)
"""The other way round, with what releases called a class before."""

NO_USERS_TRAINER = frozenset({"BaseTrainer", "_BaseTrainer", "BaseSelfDistillationTrainer"})
"""Classes of TRL's that others derive from, and with which nobody trains."""

ADAPTERS = frozenset(
    words("""
        adalora adamss adaption_prompt beft boft bone c3a cartridge cpt deft delora fourierft frod glora gralora
        hira hra ia3 lily ln_tuning loha lokr lora miss multitask_prompt_tuning oft osf p_tuning peanut poly
        prefix_tuning prompt_tuning psoft pvera randlora road shadow shira supertuning tinylora trainable_tokens
        unilora vblora vera waveft xlora
    """)
)
"""``peft.PeftType`` in small letters: values of ``adapter.type``."""

OPTIMIZERS = frozenset(
    words("""
        adafactor adagrad adalomo adamw_8bit adamw_anyprecision adamw_apex_fused adamw_bnb_8bit adamw_hf
        adamw_torch adamw_torch_4bit adamw_torch_8bit adamw_torch_fused adamw_torch_npu_fused adamw_torch_xla
        ademamix ademamix_8bit apollo_adamw apollo_adamw_layerwise galore_adafactor galore_adafactor_layerwise
        galore_adamw galore_adamw_8bit galore_adamw_8bit_layerwise galore_adamw_layerwise grokadamw lion_32bit
        lion_8bit lomo paged_adamw_32bit paged_adamw_8bit paged_ademamix_32bit paged_ademamix_8bit
        paged_lion_32bit paged_lion_8bit rmsprop rmsprop_bnb rmsprop_bnb_32bit rmsprop_bnb_8bit
        schedule_free_adamw schedule_free_radam schedule_free_sgd sgd stable_adamw
    """)
)
"""``transformers.training_args.OptimizerNames``: values of the argument ``optim``."""

CALLBACKS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            words("""
        AzureMLCallback ClearMLCallback CodeCarbonCallback CometCallback DVCLiveCallback DagsHubCallback
        FlyteCallback KubeflowCallback LogCompletionsCallback MLflowCallback NeptuneCallback PrinterCallback
        ProgressCallback RichProgressCallback SwanLabCallback TensorBoardCallback TrackioCallback WandbCallback
        WeaveCallback WinRateCallback StepIntervalCallback
    """),
            "reports",
        ),
        **dict.fromkeys(["DefaultFlowCallback", "EarlyStoppingCallback", "TrainerCallback"], "flow"),
        **dict.fromkeys(
            words("""
        BEMACallback EMATeacherSyncCallback MergeModelCallback PEFTAdapterEMACallback SyncRefModelCallback
        SyncTeacherModelCallback GOLDVLLMSyncCallback
    """),
            "weights",
        ),
    }
)
"""Callbacks of Transformers' and TRL's to what they do: they ``report``, decide about the ``flow`` of a training, or
read or write ``weights``. Values of ``life.callbacks``. Names that begin with ``_`` are the libraries' own."""

PARALLELISM: Mapping[str, str] = MappingProxyType(
    {
        "dp_replicate_size": "parallel.replicate",
        "dp_shard_size": "parallel.shard",
        "tp_size": "parallel.tensor",
        "cp_size": "parallel.context",
        "cp_backend": "parallel.context_engine",
        "sp_size": "parallel.sequence",
        "sp_backend": "parallel.sequence_engine",
        **dict.fromkeys(["tp_handler", "cp_handler", "sp_handler"], "parallel.handlers"),
    }
)
"""Fields of ``accelerate.ParallelismConfig`` to the axis that has their value."""


@dataclass(frozen=True)
class Axis:
    """
    Attributes:
        values: what it may have, for people.
        look: what to look at where a file does not say it.
    """

    values: str
    look: str


AXES: Mapping[str, Axis] = MappingProxyType(
    {
        "model.name": Axis("a name or a folder", "the name or folder that from_pretrained is given"),
        "model.family": Axis("model_type of its config", "model_type in the model's config.json"),
        "model.tied": Axis("true, false", "tie_word_embeddings in the model's config.json"),
        "model.experts": Axis("true, false", "num_experts, num_local_experts or n_routed_experts in config.json"),
        "model.vision": Axis("true, false", "whether config.json has a vision_config"),
        "model.dtype": Axis("float32, bfloat16, float16", "the dtype that from_pretrained loads weights in"),
        "model.changed": Axis("true, false", "whether weights are changed between from_pretrained and the trainer"),
        "model.given": Axis("name, object", "whether the trainer is given the model's name or a model"),
        "model.quantised": Axis("true, false", "load_in_4bit or load_in_8bit"),
        "model.attention_dropout": Axis("true, false", "attention_dropout or attn_pdrop in the model's config.json"),
        "model.buffers": Axis("true, false", "whether the checkpoint has buffers, such as e_score_correction_bias"),
        "model.kind": Axis("a word of the suites", "the model: what its config.json and its code have"),
        "adapter.type": Axis("one of ADAPTERS, null", "whether a peft_config is given or the model is a PeftModel"),
        "adapter.made_by": Axis("trainer, user", "whether the trainer is given a peft_config or a PeftModel"),
        "adapter.init": Axis("init_lora_weights", "init_lora_weights of the adapter's config"),
        "adapter.modules_to_save": Axis("names", "modules_to_save of the adapter's config"),
        "adapter.saves_head": Axis("true, false", "whether modules_to_save names the output head"),
        "adapter.trains_tokens": Axis("true, false", "trainable_token_indices of the adapter's config"),
        "adapter.target_parameters": Axis("true, false", "target_parameters of the adapter's config"),
        "adapter.dora": Axis("true, false", "use_dora of the adapter's config"),
        "adapter.dropout": Axis("true, false", "lora_dropout of the adapter's config"),
        "adapter.bias": Axis("none, all, lora_only", "bias of the adapter's config"),
        "adapter.task_type": Axis("CAUSAL_LM, SEQ_CLS, ...", "task_type of the adapter's config"),
        "adapter.kind": Axis("a word of the suites", "the adapter's config, and how it is given"),
        "optimizer.given": Axis("true, false", "whether the trainer is given optimizers=(...)"),
        "optimizer.deepspeed": Axis("a name, null", "optimizer in DeepSpeed's config"),
        "optimizer.deepspeed_scheduler": Axis("a name, null", "scheduler in DeepSpeed's config"),
        "data.form": Axis("a word of the suites", "the columns of the first row of the data, and their types"),
        "data.columns": Axis("names", "column_names of the data"),
        "data.streamed": Axis("true, false", "whether the data is an IterableDataset"),
        "data.images": Axis("null, image, mixed, ...", "whether rows have images, and how many each"),
        "data.tokenizer": Axis("a word of the suites", "the tokenizer: special tokens, padding side, template"),
        "data.template": Axis("a word of the suites", "the chat template that is in force"),
        "data.tools": Axis("a word of the suites", "whether the trainer is given tools or an environment"),
        "data.rewards": Axis("a word of the suites", "the reward functions, and what they return"),
        "data.given": Axis("a word of the suites", "what the trainer is given beside its model, config and data"),
        "parallel.strategy": Axis("single, ddp, zero1 ...", "how the command starts processes: its file and options"),
        "parallel.processes": Axis("a number", "num_processes of the launch"),
        "parallel.replicate": Axis("a number", "dp_replicate_size of ParallelismConfig"),
        "parallel.shard": Axis("a number", "dp_shard_size of ParallelismConfig"),
        "parallel.tensor": Axis("a number", "tp_size of ParallelismConfig"),
        "parallel.context": Axis("a number", "cp_size of ParallelismConfig"),
        "parallel.context_engine": Axis("a name", "cp_backend of ParallelismConfig"),
        "parallel.sequence": Axis("a number", "sp_size of ParallelismConfig"),
        "parallel.sequence_engine": Axis("a name", "sp_backend of ParallelismConfig"),
        "parallel.handlers": Axis("true, false", "the handlers of ParallelismConfig"),
        "parallel.expert": Axis("a number", "the size of expert parallelism"),
        "engine.deepspeed": Axis("DeepSpeed's config", "the file that deepspeed or Accelerate's config names"),
        "engine.fsdp": Axis("Accelerate's fsdp_config", "fsdp_config of Accelerate's file or of the arguments"),
        "engine.fsdp_sharding": Axis("full_shard, no_shard ...", "fsdp_sharding_strategy"),
        "engine.state_dict": Axis("full, sharded, local", "fsdp_state_dict_type"),
        "engine.offload_parameters": Axis("true, false", "offload_param of DeepSpeed, or fsdp_offload_params"),
        "engine.wrapper_checkpointing": Axis("true, false", "fsdp_activation_checkpointing"),
        "engine.gradient_sums": Axis("fp32, bf16, fp16", "grad_accum_dtype of data_types in DeepSpeed's config"),
        "engine.mixed_precision": Axis("no, fp16, bf16", "mixed_precision of Accelerate's file"),
        "life.evaluation": Axis("a word of the suites", "whether, when and on what evaluate() is called"),
        "life.resumed": Axis("true, false", "whether the training is resumed from a checkpoint"),
        "life.saved": Axis("true, false", "whether save_model is called, or checkpoints are written"),
        "life.callbacks": Axis("names", "callbacks that the trainer is given"),
        "life.trained_again": Axis("true, false", "whether train() is called after evaluate(), or a second time"),
        "life.prepared_again": Axis("true, false", "whether two trainers are given the same data"),
        "life.kind": Axis("a word of the suites", "how the trainer is built and used"),
    }
)
"""Axes that are no fields of a config."""


def axis_named(name: str) -> Axis | None:
    """An axis by ``part.name``; ``None`` where there is none, or no config has such a field in any release."""
    part, _, field = name.partition(".")
    if part != "arguments":
        return AXES.get(name)
    if names_of(field)[0] not in ARGUMENTS:
        return None
    return Axis("a value of the config", f"the config's {field}")


def look_at(name: str, expected: Any = None) -> str:
    """What to look at to know the value of an axis, and what it would have to be."""
    axis = axis_named(name)
    what = axis.look if axis is not None else name
    return what if expected is None else f"{what} ({_described(expected)})"


def _described(expected: Any) -> str:
    if isinstance(expected, Mapping):
        test, operand = next(iter(expected.items()))
        words = {
            "at_least": "at least",
            "at_most": "at most",
            "has": "with",
            "like": "near",
            "above": "above",
            "below": "below",
        }
        if test == "given":
            return "any" if operand else "none"
        return f"{words.get(test, test)} {operand}"
    if isinstance(expected, list):
        return " or ".join(map(str, expected))
    return {True: "yes", False: "no"}.get(expected, str(expected)) if isinstance(expected, bool) else str(expected)


def trainer_of_class(names: tuple[str, ...]) -> str:
    """The trainer of a class, by its name and those of its bases, its own first; ``trainer`` where none is TRL's."""
    return next((CLASSES[name] for name in names if name in CLASSES and CLASSES[name] != "trainer"), "trainer")
