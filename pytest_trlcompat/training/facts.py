"""Values of axes that follow from the configs of a model, an adapter and an engine, wherever these come from.

Imports the standard library alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_trlcompat.training.errors import TrainingError

__all__ = ["HEADS", "adapter_facts", "deepspeed_facts", "fsdp_facts", "model_facts", "section_of"]

HEADS = ("lm_head", "score", "v_head", "classifier")
"""What output heads are called."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_SHARDING = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard", "5": "hybrid_shard_zero2"}


def model_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a model by its config, given as ``to_dict()`` or ``config.json`` has it."""
    text = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else {}
    # A model with images has the config of its text model within.
    both = {**(text or {}), **config}
    values: dict[str, Any] = {
        "model.experts": any(both.get(name) for name in _EXPERTS),
        "model.vision": config.get("vision_config") is not None,
        "model.attention_dropout": any(isinstance(both.get(name), float) and both[name] > 0 for name in _DROPOUTS),
    }
    if config.get("model_type"):
        values["model.family"] = config["model_type"]
    if isinstance(config.get("tie_word_embeddings"), bool):
        values["model.tied"] = config["tie_word_embeddings"]
    if config.get("quantization_config"):
        values["model.quantised"] = True
    return values


def adapter_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of an adapter by its config, given as ``to_dict()`` or ``adapter_config.json`` has it."""
    modules = list(config.get("modules_to_save") or [])
    return {
        # The text of an enum may begin with its class: PeftType.LORA.
        "adapter.type": str(config.get("peft_type", "lora")).rpartition(".")[2].casefold(),
        "adapter.modules_to_save": modules,
        "adapter.saves_head": any(name in HEADS for name in modules),
        "adapter.trains_tokens": bool(config.get("trainable_token_indices")),
        "adapter.target_parameters": bool(config.get("target_parameters")),
        "adapter.dora": bool(config.get("use_dora")),
        "adapter.dropout": bool(config.get("lora_dropout")),
        "adapter.bias": config.get("bias", "none"),
        "adapter.init": config.get("init_lora_weights", True),
        "adapter.task_type": None if config.get("task_type") is None else str(config["task_type"]).rpartition(".")[2],
    }


def section_of(document: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    """A part of a document, empty where it is not there.

    Raises:
        TrainingError: it has no names and values.
    """
    section = document.get(name) or {}
    if not isinstance(section, Mapping):
        raise TrainingError(f"{source}: {name} must have names and values, {section!r} was found; correct it")
    return section


def deepspeed_facts(document: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Of a training under DeepSpeed with this config.

    Raises:
        TrainingError: a ``stage`` that is none of 0 to 3, or a section without names and values.
    """
    zero = section_of(document, "zero_optimization", source)
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise TrainingError(f"{source}: a stage of ZeRO from 0 to 3 was expected, {stage!r} was found; correct it")
    optimizer, scheduler = (section_of(document, name, source).get("type") for name in ("optimizer", "scheduler"))
    return {
        "parallel.strategy": f"zero{int(stage)}",
        "engine.deepspeed": dict(document),
        "engine.offload_parameters": section_of(zero, "offload_param", source).get("device") not in ("none", None),
        "engine.gradient_sums": section_of(document, "data_types", source).get("grad_accum_dtype"),
        "optimizer.deepspeed": optimizer,
        "optimizer.deepspeed_scheduler": scheduler,
    }


def fsdp_facts(section: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Of a training under FSDP with this section of Accelerate's file, or with a config's ``fsdp_config``.

    Raises:
        TrainingError: a version that is neither 1 nor 2.
    """
    plain = {str(name).removeprefix("fsdp_"): value for name, value in section.items()}
    version = str(plain.get("version", 1))
    if version not in ("1", "2"):
        raise TrainingError(f"{source}: fsdp_version 1 or 2 was expected, {version} was found; correct it")
    sharding = str(plain.get("sharding_strategy") or "full_shard").rpartition(".")[2].casefold()
    form = str(plain.get("state_dict_type") or "").rpartition(".")[2].casefold().removesuffix("_state_dict")
    return {
        "parallel.strategy": f"fsdp{version}",
        "engine.fsdp": dict(section),
        "engine.fsdp_sharding": _SHARDING.get(sharding, sharding),
        "engine.offload_parameters": _truth(plain.get("offload_params", False)),
        "engine.wrapper_checkpointing": _truth(plain.get("activation_checkpointing", False)),
        **({"engine.state_dict": form} if form else {}),
    }


def _truth(value: Any) -> bool:
    return value.casefold() in ("true", "1", "yes") if isinstance(value, str) else bool(value)
