"""The axes of a setting, and the config of a setting with the installed release of TRL.

Runs inside a rank.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import tempfile
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from pytest_trlcompat.conformance import architectures, images, liger
from pytest_trlcompat.conformance.grpo import environments
from pytest_trlcompat.conformance.grpo.methods import GRPO, RLOO, Method
from pytest_trlcompat.conformance.training import PLAIN, world_size
from pytest_trlcompat.training.aliases import renamed

__all__ = [
    "AXES",
    "BASE",
    "ROWS",
    "calls_of_a_generation",
    "config_of",
    "is_known",
    "known_part",
    "lacking",
]

ROWS = 8
"""Completions in a micro-batch, over all ranks."""
GENERATIONS = 2
"""How many generations a training has at least."""
AXES: Mapping[str, tuple[Any, ...]] = {
    "data": ("plain", "conversational", "assistant_last", "iterable", "list", "none", "texts"),
    "prompts": (24, 5, 16),
    "rewards": (
        *("letters", "target", "prompt", "two", "sometimes", "nowhere", "equal"),
        *("partial", "object", "async_object", "one_number", "shared_class"),
        *("model", "compiled_model", "model_nan", "logging"),
    ),
    "model": (
        "dense",
        "bfloat16",
        "changed",
        "experts",
        "generation_settings",
        "name",
        "tied",
        "two_ends",
        *images.MODELS,
        *architectures.ARCHITECTURES,
    ),
    "tokenizer": ("", "other_end", "no_padding", "tools_template", "drops_calls"),
    "adapter": ("", "peft_config", "peft_model", "peft_parameters", "saved_head", "trained_tokens", "both", "mapping"),
    "evaluation": ("", "after", "before", "during"),
    "prompts_of_evaluation": (4, 5, 6),
    "seeds": ("", "twice"),
    "refused": (False, True, "allowed", "0.15", "0.28", "1.10"),
    "refused_in": ("", "training"),
    "resumed": ("", "between_generations", "within_generation"),
    "tools": ("", "calls", *environments.KINDS),
    "images": images.AXIS,
    "liger": liger.AXIS,
}
"""What a setting may have in addition to fields of the config; the default is first. :mod:`~.objects` explains them."""
_SINCE = {
    ("rewards", "sometimes"): "trl>=0.16",
    ("rewards", "nowhere"): "trl>=0.16",
    ("rewards", "async_object"): "trl>=1.9",
    ("rewards", "logging"): "trl>=1",
    ("rewards", "model_nan"): "trl>=0.16",
    ("model", "experts"): "transformers>=4.51",
    ("model", "vision"): "trl>=0.20",
    ("model", "llava"): "trl>=0.20",
    ("images", "image"): "trl>=0.20",
    ("images", "unused"): "trl>=0.20",
    **{("images", kind): "trl>=0.24" for kind in ("images", "two", "mixed", "sometimes", "placeholders")},
    ("adapter", "peft_parameters"): "peft>=0.17 transformers>=5",
    ("adapter", "trained_tokens"): "peft>=0.15",
    ("tools", "calls"): "trl>=0.26 transformers>=5",
    ("tools", "environment"): "trl>=0.29 transformers>=5.2",
    ("tools", "environment_reward"): "trl>=1.8 transformers>=5.2",
    ("tools", "environments"): "trl>=1.8 transformers>=5.2",
    ("liger", "loss"): liger.GRPO_LOSS,
    **architectures.SINCE,
    **{("refused", release): f"trl>={release}" for release in AXES["refused"] if str(release)[0].isdigit()},
}
"""The releases that have or document a value of an axis, as requirements. Where ``refused`` is a release, the refusal
is documented from that release on; before, the setting does no harm."""
_CHOICES = ("importance_sampling_level", "loss_type", "multi_objective_aggregation", "scale_rewards")
"""Fields that got more values from release to release."""
BASE: Mapping[str, Any] = {**PLAIN, "num_generations": 4, "temperature": 1.0, "max_completion_length": 5}


def is_known(trl: Any, name: str, value: Any, method: Method = GRPO) -> bool:
    """Whether the release has the field and, where its value is one of several names, documents this name.

    Args:
        name: of a field, or one of :data:`AXES`.
    """
    if name in AXES:
        stated = _SINCE.get((name, value), "trl")
        if method is RLOO and name == "images" and value:
            stated = "trl>=0.24"
        since = (Requirement(text) for text in stated.split())
        # A commit between two releases is a pre-release of the later one.
        return all(
            requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
            for requirement in since
        )
    described = {
        field.name: str(field.metadata.get("help", ""))
        for field in dataclasses.fields(getattr(trl, method.config_class))
    }
    if name in _CHOICES and isinstance(value, str):
        return re.search(f"['\"`]{re.escape(value)}['\"`]", described.get(name, "")) is not None
    return name in described


def lacking(setting: Mapping[str, Any]) -> str:
    """Which package the setting needs with this release and this environment lacks; empty where none."""
    if missing := liger.lacking(setting) or images.lacking(setting):
        return missing
    if not setting.get("tools") or importlib.util.find_spec("jmespath") is not None:
        return ""
    trl, transformers = (Version(metadata.version(name)) for name in ("trl", "transformers"))
    if trl >= Version("1.10") and transformers >= Version("5.13"):
        return ""
    return f"TRL {trl} with Transformers {transformers} needs jmespath for tools, which is not installed here"


def known_part(trl: Any, setting: Mapping[str, Any], method: Method = GRPO) -> dict[str, Any]:
    """The part of a setting that this release knows."""
    return {name: value for name, value in setting.items() if is_known(trl, name, value, method)}


def config_of(trl: Any, setting: Mapping[str, Any], method: Method = GRPO) -> Any:
    """The ``GRPOConfig`` or ``RLOOConfig`` of a setting, without fields that this release does not know."""
    known = known_part(trl, {**BASE, **{name: value for name, value in setting.items() if name not in AXES}}, method)
    rows = ROWS // world_size()
    # These releases count prompts, not completions.
    if Version(metadata.version("trl")) < Version("0.15"):
        rows = max(1, rows // known["num_generations"])
    values: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(prefix="trlcompat-"),
        "per_device_train_batch_size": rows,
        "per_device_eval_batch_size": rows,
    }
    if "num_train_epochs" not in known:
        values["max_steps"] = steps_of(known, is_known(trl, "num_iterations", 1, method))
    if world_size() > 1 and hasattr(importlib.import_module("trl.trainer.utils"), "create_model_from_path"):
        # These releases load the reference model onto device 0 on every rank, as under FSDP; see OneDevicePerRankMixin.
        values["model_init_kwargs"] = {"device_map": None}
    if setting.get("evaluation") == "during":
        values |= renamed(getattr(trl, method.config_class), {"eval_strategy": "steps", "eval_steps": 1})
    values |= known
    values |= liger.fields(setting, {field.name for field in dataclasses.fields(getattr(trl, method.config_class))})
    if setting.get("resumed"):
        values |= {"save_strategy": "steps", "save_steps": _steps_before(setting, values)}
    return getattr(trl, method.config_class)(**known_part(trl, values, method))


def calls_of_a_generation(trl: Any, accumulated: int) -> int:
    """How often TRL samples on a rank before it trains on the completions.

    0.16 samples for each micro-batch of an optimizer step separately, and ``num_iterations`` repeats the whole step.
    """
    return (
        accumulated if is_known(trl, "num_iterations", 1) and Version(metadata.version("trl")) < Version("0.17") else 1
    )


def steps_of(arguments: Mapping[str, Any], has_iterations: bool) -> int:
    """Optimizer steps until the last micro-batch of the second generation."""
    accumulated = arguments["gradient_accumulation_steps"]
    if not has_iterations:
        return GENERATIONS
    micro_batches = (arguments.get("steps_per_generation") or accumulated) * arguments.get("num_iterations", 1)
    return -(-GENERATIONS * micro_batches // accumulated)


def _steps_before(setting: Mapping[str, Any], values: Mapping[str, Any]) -> int:
    """Steps before the checkpoint from which a training is resumed."""
    return 1 if setting["resumed"] == "within_generation" else max(1, int(values["max_steps"]) // GENERATIONS)
