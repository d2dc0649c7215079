"""A row of a conformance suite as conditions on a user's training: on which axes the two must agree.

Imports the standard library and the vocabulary of trainings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_trlcompat.training.aliases import names_of
from pytest_trlcompat.training.argument_names import ARGUMENTS, words

__all__ = ["INSTRUMENTS", "conditions_of", "is_placed"]

INSTRUMENTS = frozenset(
    words("""
        refused refused_in refused_naming learning_rate max_steps num_train_epochs prompts pairs prompts_of_evaluation
        pairs_of_evaluation seeds logging_steps save_steps save_strategy reference lr_scheduler_type optim weight_decay
        warmup_steps per_device_train_batch_size per_device_eval_batch_size total_episodes num_generations
        max_completion_length reward_weights ref_model_sync_steps ref_model_mixup_alpha
        local_rollout_forward_batch_size nll
    """)
)
"""What makes a row quick or short, or its differences visible: where it has something else, it is about that."""

_COUNTS = frozenset(words("gradient_accumulation_steps num_iterations num_mini_batches num_ppo_epochs"))
"""Of these it matters whether there is more than one."""
_LENGTHS = frozenset(words("max_length max_prompt_length max_seq_length"))
_ADAPTER = {"adapter.type": {"given": True}}
_FAMILIES = {
    **{name: name for name in ("gpt2", "gpt_neox", "granite", "gemma2", "cohere", "phi", "recurrent_gemma")},
    "modernbert": ["modernbert", "modernbert-decoder"],
}

_VALUES: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("adapter", "peft_config"): {**_ADAPTER, "adapter.made_by": "trainer"},
    ("adapter", "peft_model"): {**_ADAPTER, "adapter.made_by": "user"},
    ("adapter", "peft_parameters"): {"adapter.target_parameters": True},
    ("adapter", "saved_head"): {"adapter.saves_head": True},
    ("adapter", "trained_tokens"): {"adapter.trains_tokens": True},
    ("adapter", "prefix_tuning"): {"adapter.type": "prefix_tuning"},
    ("adapter", "prompt_tuning"): {"adapter.type": "prompt_tuning"},
    ("model", "bfloat16"): {"model.dtype": "bfloat16"},
    ("model", "changed"): {"model.changed": True},
    ("model", "name"): {"model.given": "name"},
    ("model", "tied"): {"model.tied": True},
    ("model", "experts"): {"model.experts": True},
    ("model", "vision"): {"model.vision": True},
    ("model", "llava"): {"model.vision": True},
    **{("model", name): {"model.family": family} for name, family in _FAMILIES.items()},
    ("dropout", "attention"): {"model.attention_dropout": True},
    ("dropout", "adapter"): {"adapter.dropout": True},
    ("evaluation", "during"): {"eval_strategy": {"not": "no"}},
    ("given", "twice"): {"life.prepared_again": True},
    ("task", ""): {"adapter.task_type": {"not": "SEQ_CLS"}, **_ADAPTER},
    ("liger", "loss"): {"use_liger_kernel": True},
    ("liger", "kernels"): {"use_liger_kernel": True},
}
"""Values of axes that no config has, where an axis of a training says the same."""
_AXES: Mapping[str, str] = {
    "adapter": "adapter.kind",
    "arguments": "data.given",
    "data": "data.form",
    "dropout": "model.kind",
    "evaluation": "life.evaluation",
    "given": "data.given",
    "images": "data.images",
    "labels": "data.form",
    "liger": "life.kind",
    "loss_function": "data.given",
    "margins": "data.form",
    "metrics": "data.given",
    "model": "model.kind",
    "policy": "model.kind",
    "reward_function": "data.rewards",
    "rewards": "data.rewards",
    "stream": "data.streamed",
    "task": "adapter.task_type",
    "teacher": "model.kind",
    "template": "data.template",
    "tokenizer": "data.tokenizer",
    "tools": "data.tools",
    "transform": "data.given",
}
"""The axis of a training that has all other values; what files say of these axes is little, so that a user is told
what to look at."""
_OF_THE_TRAINING = {"resumed": {"life.resumed": True}}


def _is_argument(axis: str) -> bool:
    return names_of(axis)[0] in ARGUMENTS


def is_placed(axis: str) -> bool:
    """Whether it is known what an axis of rows is in a training."""
    return _is_argument(axis) or axis in INSTRUMENTS or axis in _AXES or axis in _OF_THE_TRAINING


def conditions_of(axis: str, value: Any) -> Mapping[str, Any]:
    """On what a training must agree with a row that has this value.

    A number is not asked for exactly: of counts it matters that there are several, of other numbers it cannot be told
    whether one near to it acts alike. ``max_length`` of a row cuts its data; a user's may be longer than theirs.

    Raises:
        KeyError: an axis that is not :func:`is_placed`.
    """
    if axis in _OF_THE_TRAINING:
        return _OF_THE_TRAINING[axis]
    if isinstance(value, (str, bool)) and (axis, str(value)) in _VALUES:
        return _VALUES[axis, str(value)]
    if axis in _AXES:
        also = {"model.vision": True} if axis == "images" else {}
        return {_AXES[axis]: value if axis == "stream" else f"{value}", **also}
    if axis in _LENGTHS:
        return {"data.form": "rows longer than the config's lengths"}
    if not is_placed(axis):
        raise KeyError(axis)
    if not _is_argument(axis):
        return {"life.kind": f"{axis} {value}"}
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return {axis: {"above": 1} if axis in _COUNTS and value > 1 else {"like": value}}
    return {axis: [value] if isinstance(value, (list, dict)) else value}
