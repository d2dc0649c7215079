"""What the adapters of PPO and of the legacy RLOO share.

Runs inside a rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

from packaging.version import Version

from pytest_trlcompat.conformance import comparison
from pytest_trlcompat.conformance.comparison import Difference
from pytest_trlcompat.conformance.on_policy.quantities import before_steps
from pytest_trlcompat.conformance.on_policy.records import OnPolicyRecording

__all__ = [
    "differences_before_steps",
    "is_measured_before_steps",
    "logging_steps",
    "neighbours",
    "rows_of_batch",
    "unknown_fields",
]


def neighbours(untrained: Any, trained: Sequence[str]) -> Iterator[Any]:
    """The untrained models, with each weight of those that are trained changed by one unit in its last place.

    Args:
        untrained: a dataclass that has the models.
        trained: names of its fields.
    """
    for changed in comparison.neighbours(*(getattr(untrained, name) for name in trained)):
        yield dataclasses.replace(untrained, **dict(zip(trained, changed, strict=True)))


def differences_before_steps(recordings: Sequence[OnPolicyRecording]) -> list[Difference]:
    return [*before_steps(recordings[0])] if is_measured_before_steps() else []


def is_measured_before_steps() -> bool:
    """Whether what precedes the steps is compared: it is measured from 0.12 on."""
    return Version(metadata.version("trl")) >= Version("0.12")


def unknown_fields(setting: Mapping[str, Any], config: type) -> list[str]:
    return sorted(set(setting) - {field.name for field in dataclasses.fields(config)})


def logging_steps(recordings: Sequence[OnPolicyRecording]) -> int:
    return int(recordings[0].arguments["logging_steps"])


def rows_of_batch(recordings: Sequence[OnPolicyRecording]) -> int:
    """The documented number of rows of a batch on one rank."""
    arguments = recordings[0].arguments
    return int(arguments["per_device_train_batch_size"]) * int(arguments["gradient_accumulation_steps"])
