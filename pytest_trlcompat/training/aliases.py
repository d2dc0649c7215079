"""The arguments that releases have renamed, and how the release that is there calls them.

What builds or reads a config, or gives arguments to a trainer, uses the newest name; only this module knows the older
ones. It looks at the config class or the function that is there, since a version says less: a release may take both
names, and a development version either. Imports the standard library alone.

A new name of an argument is one line of :data:`RENAMED`. An argument that changed what it means is no alias.
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
        # Trainers themselves; PPO's until TRL 0.12 had names of its own for all that it is given.
        "processing_class": ("tokenizer",),
        "args": ("config",),
        "model": ("policy",),
        "ref_model": ("ref_policy",),
    }
)
"""The newest name of an argument to what releases called it before, the newest first."""

_EVERY = {name: (newest, *older) for newest, older in RENAMED.items() for name in (newest, *older)}


def names_of(name: str) -> tuple[str, ...]:
    """All names of an argument, the newest first, by any of them; only itself for one that was never renamed."""
    return _EVERY.get(name, (name,))


def name_in(taken: Container[str], name: str) -> str | None:
    """How an argument is called where some names are taken; ``None`` where it is not known there.

    A name that is taken stays: releases take an old one beside the new one for a while.
    """
    return next((candidate for candidate in (name, *names_of(name)) if candidate in taken), None)


def names_taken(target: Callable[..., Any]) -> frozenset[str]:
    """The fields of a config class, or the parameters of a function or of another class's constructor."""
    if dataclasses.is_dataclass(target):
        return frozenset(field.name for field in dataclasses.fields(target) if field.init)
    function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    return frozenset(inspect.signature(inspect.unwrap(function)).parameters)


def accepted(target: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names that a config class or a function takes; those that it does not know are left out."""
    taken = names_taken(target)
    return {name: value for argument, value in arguments.items() if (name := name_in(taken, argument)) is not None}


def renamed(target: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The same, with those that it does not know as they are: it refuses them, or passes them on."""
    taken = names_taken(target)
    return {name_in(taken, argument) or argument: value for argument, value in arguments.items()}


def value_of(config: object, name: str, default: Any = None) -> Any:
    """What a config or a trainer holds for an argument, whatever its release calls it."""
    return next((getattr(config, known_name) for known_name in names_of(name) if hasattr(config, known_name)), default)
