"""The base of the adapters of PPO and of the legacy RLOO: how their recordings are compared.

Runs inside a rank.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar

from packaging.version import Version

from pytest_trlcompat.conformance import comparison, conventions
from pytest_trlcompat.conformance.adapter import TrainerAdapter
from pytest_trlcompat.conformance.comparison import Quantity
from pytest_trlcompat.conformance.conventions import Conventions
from pytest_trlcompat.conformance.on_policy.quantities import before_steps
from pytest_trlcompat.conformance.on_policy.records import OnPolicyRecording

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["OnPolicyAdapter", "is_measured_before_steps", "logging_steps", "rows_of_batch", "unknown_fields"]


class OnPolicyAdapter(TrainerAdapter):
    """
    Attributes:
        trained: names of the models that are trained, attributes of the untrained models.
    """

    trained: ClassVar[tuple[str, ...]]

    @abc.abstractmethod
    def expected(self, recordings: Sequence[OnPolicyRecording], untrained: Any, known: Conventions) -> list[Quantity]:
        """The quantities that the reference computes for the recordings."""

    @abc.abstractmethod
    def recorded(self, recordings: Sequence[OnPolicyRecording]) -> Mapping[tuple[str, str], Any]:
        """The quantities that were recorded, by stage and place."""

    def compare(
        self,
        recordings: Sequence[OnPolicyRecording],
        untrained: Any,
        model: TinyModel,
        setting: Mapping[str, Any],
        seed: int,
    ) -> comparison.Comparison:
        known = conventions.of_installed(self.trainer)
        unrecorded = known.unrecorded_with(recordings[0].arguments)

        def expected(untrained: Any) -> list[Quantity]:
            return comparison.stated(self.expected(recordings, untrained, known), unrecorded)

        def neighbours() -> list[list[Quantity]]:
            models = [getattr(untrained, name) for name in self.trained]
            return [
                expected(dataclasses.replace(untrained, **dict(zip(self.trained, changed, strict=True))))
                for changed in comparison.neighbours(*models)
            ]

        return comparison.compare_with_reference(
            expected(untrained),
            self.recorded(recordings),
            neighbours,
            [*before_steps(recordings[0])] if is_measured_before_steps() else [],
        )


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
