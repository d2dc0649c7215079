"""The arguments that releases have renamed, and their names in the installed release.

Code that builds or reads a config, or passes arguments to a trainer, uses the newest name; only this module knows the
older ones. It looks at the installed config class or function, since a version says less: a release may take both
names, and a development version either of them.

A new name of an argument is one line of :data:`RENAMED`. An argument whose meaning has changed is no alias.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Container, Mapping
from types import MappingProxyType
from typing import Any

__all__ = ["RENAMED", "accepted", "name_in", "names_of", "names_taken", "renamed", "value_of"]

RENAMED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # transformers.TrainingArguments
        "activation_checkpointing": ("gradient_checkpointing",),
        "activation_checkpointing_kwargs": ("gradient_checkpointing_kwargs",),
        "eval_strategy": ("evaluation_strategy",),
        "per_device_eval_batch_size": ("per_gpu_eval_batch_size",),
        "per_device_train_batch_size": ("per_gpu_train_batch_size",),
        "torch_compile_backend": ("torchdynamo",),
        # TRL's configs
        "log_unique_prompts": ("wandb_log_unique_prompts",),
        # transformers.PretrainedConfig
        "dtype": ("torch_dtype",),
        # Arguments of trainers. Until TRL 0.12, PPO's trainer had its own names for all of them.
        "processing_class": ("tokenizer",),
        "args": ("config",),
        "model": ("policy",),
        "ref_model": ("ref_policy",),
    }
)
"""The older names of an argument by its newest name, the newest of them first."""

_EVERY = {name: (newest, *older) for newest, older in RENAMED.items() for name in (newest, *older)}


def names_of(name: str) -> tuple[str, ...]:
    """All names of an argument, found by any of them, the newest first; only ``name`` where it was never renamed."""
    return _EVERY.get(name, (name,))


def name_in(taken: Container[str], name: str) -> str | None:
    """The name of an argument among the names that are taken; ``None`` where none of its names is.

    Where ``name`` itself is taken it stays: for a while, releases take an old name together with the new one.
    """
    return next((candidate for candidate in (name, *names_of(name)) if candidate in taken), None)


def names_taken(target: Callable[..., Any]) -> frozenset[str]:
    """The fields of a config class, or the parameters of a function or of another class's constructor."""
    if dataclasses.is_dataclass(target):
        return frozenset(field.name for field in dataclasses.fields(target) if field.init)
    function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    return frozenset(inspect.signature(inspect.unwrap(function)).parameters)


def accepted(target: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names that a config class or a function takes, without those that it does not take."""
    taken = names_taken(target)
    return {name: value for argument, value in arguments.items() if (name := name_in(taken, argument)) is not None}


def renamed(target: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The same with all arguments: those that it does not take keep their names, and it refuses or passes them on."""
    taken = names_taken(target)
    return {name_in(taken, argument) or argument: value for argument, value in arguments.items()}


def value_of(config: object, name: str, default: Any = None) -> Any:
    """The value of an argument in a config or a trainer, under whichever name its release has."""
    return next((getattr(config, known_name) for known_name in names_of(name) if hasattr(config, known_name)), default)
