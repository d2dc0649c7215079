"""What a project's own file of settings says: TRL's YAML and such as it, axolotl's, LLaMA-Factory's.

Imports the standard library alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pytest_trlcompat.training.aliases import names_of
from pytest_trlcompat.training.facts import HEADS
from pytest_trlcompat.training.reading.checkpoints import of_folder
from pytest_trlcompat.training.reading.engines import of_arguments
from pytest_trlcompat.training.reading.files import scalar
from pytest_trlcompat.training.training import Training, joined

__all__ = ["of_settings"]


def of_settings(document: Mapping[str, Any], source: str, folder: Path | None = None, trainer: str = "") -> Training:
    """The training that a file of settings describes, in whose form of the three it is.

    Args:
        folder: from which paths in it count.
        trainer: who reads it, where that is known.

    Raises:
        TrainingError: a file that it names cannot be read.
    """
    form, read = _form(document)
    training = read(document, source)
    if trainer:
        training = Training(trainer, training.values, training.whole, training.source, training.notes)
    notes = (f"{source} was read as {form}'s; what its own code adds to TRL's trainers is not known here",)
    engines = of_arguments(training.arguments, source, folder)
    model = _model(training.values.get("model.name"), folder)
    return joined([model, engines, training, Training(notes=notes if form else ())])


def _form(document: Mapping[str, Any]) -> tuple[str, Callable[[Mapping[str, Any], str], Training]]:
    if "base_model" in document and not {"model_name_or_path", "stage"} & document.keys():
        return "axolotl", _of_axolotl
    if {"stage", "finetuning_type"} <= document.keys():
        return "LLaMA-Factory", _of_llamafactory
    return "", _of_trl


def _model(name: Any, folder: Path | None) -> Training:
    """What lies in the model's folder, where its name is one of this machine's."""
    path = (folder or Path()) / str(name or "")
    return of_folder(path, of_model=True) if name and path.joinpath("config.json").is_file() else Training()


def _arguments(document: Mapping[str, Any]) -> dict[str, Any]:
    """By newest names, as the command line would read them."""
    values = {names_of(name)[0]: scalar(value) for name, value in document.items()}
    # YAML takes a bare no for a truth.
    return {name: "no" if value is False and name.endswith("_strategy") else value for name, value in values.items()}


def _of_trl(document: Mapping[str, Any], source: str) -> Training:
    arguments = _arguments(document)
    return Training("", {**_named(arguments), **_of_model_config(arguments)}, whole=True, source=source)


def _named(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {f"arguments.{name}": value for name, value in arguments.items()}


def _of_model_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What ``trl.ModelConfig``'s fields say of model and adapter."""
    values: dict[str, Any] = {}
    if "model_name_or_path" in arguments:
        values["model.name"] = arguments["model_name_or_path"]
    if arguments.get("dtype") not in (None, "auto"):
        values["model.dtype"] = arguments["dtype"]
    if "load_in_4bit" in arguments or "load_in_8bit" in arguments:
        values["model.quantised"] = bool(arguments.get("load_in_4bit") or arguments.get("load_in_8bit"))
    if "use_peft" in arguments:
        values |= _adapter("lora" if arguments["use_peft"] else None, {"lora_task_type": "CAUSAL_LM", **arguments})
    if isinstance(steps := arguments.get("resume_from_checkpoint"), (str, bool)):
        values["life.resumed"] = bool(steps)
    return values


def _adapter(kind: str | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of the adapter where its options have the names of TRL's."""
    if kind is None:
        return {"adapter.type": None}
    modules = arguments.get("lora_modules_to_save") or []
    modules = [modules] if isinstance(modules, str) else modules
    return {
        "adapter.type": kind,
        "adapter.made_by": "trainer",
        "adapter.modules_to_save": modules,
        "adapter.saves_head": any(name in HEADS for name in modules),
        "adapter.target_parameters": bool(arguments.get("lora_target_parameters")),
        "adapter.trains_tokens": False,
        "adapter.dora": bool(arguments.get("use_dora")),
        "adapter.dropout": bool(arguments.get("lora_dropout", 0.05)),  # the default of ModelConfig
        "adapter.init": arguments.get("init_lora_weights", True),
        "adapter.bias": "none",
        **({"adapter.task_type": arguments["lora_task_type"]} if "lora_task_type" in arguments else {}),
    }


_AXOLOTL: Mapping[str, str] = {
    "micro_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
    "sequence_len": "max_length",
    "rl_beta": "beta",
    "peft_use_dora": "use_dora",
    "peft_init_lora_weights": "init_lora_weights",
    "lora_dropout": "lora_dropout",
    "tensor_parallel_size": "tp_size",
}
_AXOLOTL_TRAINERS = {
    "dpo": "dpo",
    "ipo": "dpo",
    "kto": "kto",
    "orpo": "orpo",
    "simpo": "cpo",
    "grpo": "grpo",
    "gdpo": "grpo",
}


def _of_axolotl(document: Mapping[str, Any], source: str) -> Training:
    given = {name: value for name, value in document.items() if value is not None}
    inner = given.get("trl") if isinstance(given.get("trl"), dict) else {}
    arguments = _arguments({_AXOLOTL.get(name, name): value for name, value in {**given, **(inner or {})}.items()})
    method = str(given.get("rl", ""))
    trainer = _AXOLOTL_TRAINERS.get(method, "reward" if given.get("reward_model") else "trainer")
    if method == "ipo":
        arguments["loss_type"] = "ipo"
    if method == "simpo":
        arguments["loss_type"] = "simpo"
    adapter = {"lora": "lora", "qlora": "lora", None: None, "": None}.get(given.get("adapter"), given.get("adapter"))
    values = {
        **_named(arguments),
        "model.name": given.get("base_model"),
        "model.quantised": bool(given.get("load_in_4bit") or given.get("load_in_8bit")),
        **_adapter(adapter, arguments),
        **{
            axis: given[name]
            for name, axis in (
                ("dp_shard_size", "parallel.shard"),
                ("dp_replicate_size", "parallel.replicate"),
                ("tensor_parallel_size", "parallel.tensor"),
                ("context_parallel_size", "parallel.context"),
            )
            if name in given
        },
        "life.resumed": bool(given.get("resume_from_checkpoint")),
    }
    if isinstance(given.get("fsdp_config"), dict) and "fsdp" not in given:
        values["arguments.fsdp"] = ["full_shard"]  # axolotl's newer form has the section alone, which is FSDP2's
        values["arguments.fsdp_config"] = {"fsdp_version": given.get("fsdp_version", 2), **given["fsdp_config"]}
    elif "fsdp_version" in given:
        values["arguments.fsdp_config"] = {"fsdp_version": given["fsdp_version"], **(given.get("fsdp_config") or {})}
    return Training(trainer, values, whole=True, source=source)


_LLAMAFACTORY: Mapping[str, str] = {
    "pref_beta": "beta",
    "pref_loss": "loss_type",
    "pref_ftx": "rpo_alpha",
    "cutoff_len": "max_length",
    "additional_target": "lora_modules_to_save",
}
_STAGES = {"dpo": "dpo", "kto": "kto", "ppo": "ppo"}


def _of_llamafactory(document: Mapping[str, Any], source: str) -> Training:
    arguments = _arguments({_LLAMAFACTORY.get(name, name): value for name, value in document.items()})
    if isinstance(arguments.get("lora_modules_to_save"), str):
        arguments["lora_modules_to_save"] = [name.strip() for name in arguments["lora_modules_to_save"].split(",")]
    if arguments.get("pissa_init"):
        arguments["init_lora_weights"] = "pissa"
    tuned = arguments.get("finetuning_type")
    values = {
        **_named(arguments),
        "model.name": arguments.get("model_name_or_path"),
        "model.quantised": bool(arguments.get("quantization_bit")),
        **_adapter(tuned if tuned not in ("full", "freeze") else None, arguments),
        "life.resumed": bool(arguments.get("resume_from_checkpoint")),
    }
    return Training(_STAGES.get(str(arguments.get("stage")), "trainer"), values, whole=True, source=source)
