"""The reference's settings of a training on the rows of a dataset, from the arguments of its trainer.

Runs inside a rank, or wherever torch is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_trlcompat.conformance.conventions import Conventions

if TYPE_CHECKING:
    from pytest_trlcompat import reference

__all__ = ["settings_from"]

Settings = TypeVar("Settings", bound="reference.SupervisedSettings")


def settings_from(
    settings_class: type[Settings],
    undecided_class: type[reference.SupervisedUndecided],
    arguments: Mapping[str, Any],
    conventions: Conventions,
    world_size: int,
    **changed: Any,
) -> Settings:
    """The reference's settings: from the arguments of a trainer and the conventions of its release.

    Args:
        conventions: of the trainer's release.
        changed: settings that the adapter computes itself, in place of an argument.
    """
    names = {field.name for field in fields(settings_class)}
    chosen = dict(conventions.absent)
    chosen |= {name: value for name, value in arguments.items() if name in names}
    for name in ("lr_scheduler_type", "optim"):
        # Transformers makes enumerations of these texts.
        chosen[name] = str(getattr(chosen[name], "value", chosen[name]))
    if not chosen.get("warmup_steps"):
        # The reference has one setting for both: below 1 it is the part of the steps that warmup_ratio names.
        chosen["warmup_steps"] = arguments.get("warmup_ratio") or 0
    # Transformers writes -1 where the number of epochs says how long it trains.
    if chosen.get("max_steps", -1) < 0:
        chosen["max_steps"] = None
    undecided = undecided_class(**conventions.undecided)
    return settings_class(**{**chosen, "world_size": world_size, "undecided": undecided, **changed})
