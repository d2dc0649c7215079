"""PPO's adapter.

Runs inside a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_trlcompat.conformance import comparison, conventions
from pytest_trlcompat.conformance.adapter import TrainerAdapter
from pytest_trlcompat.conformance.comparison import Quantity
from pytest_trlcompat.conformance.conventions import Conventions
from pytest_trlcompat.conformance.on_policy.adapter import (
    differences_before_steps,
    is_measured_before_steps,
    logging_steps,
    neighbours,
    rows_of_batch,
    unknown_fields,
)
from pytest_trlcompat.conformance.on_policy.records import OnPolicyRecording
from pytest_trlcompat.conformance.ppo import expected, objects, quantities, recording

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["ADAPTER"]


_TRAINED = ("policy", "value_model")
"""Fields of the untrained models that are trained."""


class PPOAdapter(TrainerAdapter):
    trainer: ClassVar[str] = "ppo"

    def absence(self) -> str:
        return objects.absence()

    def unknown(self, setting: Mapping[str, Any]) -> list[str]:
        from pytest_trlcompat.trainers import PPOConfig

        fields = {name: value for name, value in setting.items() if name not in recording.AXES}
        return [*unknown_fields(fields, PPOConfig), *recording.unknown(setting)]

    def record(
        self, subject: str, model: TinyModel, setting: Mapping[str, Any], seed: int
    ) -> tuple[OnPolicyRecording, expected.Untrained]:
        return recording.record(subject, model, setting, seed)

    def compare(
        self,
        recordings: Sequence[OnPolicyRecording],
        untrained: Any,
        model: TinyModel,
        setting: Mapping[str, Any],
        seed: int,
    ) -> comparison.Comparison:
        known = conventions.of_installed(self.trainer)
        recorded = quantities.recorded_quantities(recordings)
        unchanged = _expected(recordings, untrained, known)
        near: list[list[Quantity]] = []
        if comparison.exceeds_floor(unchanged, recorded):
            near = [_expected(recordings, changed, known) for changed in neighbours(untrained, _TRAINED)]
        return comparison.compare_with_reference(unchanged, recorded, near, differences_before_steps(recordings))


def _expected(recordings: Sequence[OnPolicyRecording], untrained: Any, known: Conventions) -> list[Quantity]:
    steps = expected.computed(recordings, untrained, known)
    rows = rows_of_batch(recordings) if is_measured_before_steps() else None
    computed = [*quantities.expected_quantities(steps, logging_steps(recordings), rows)]
    return comparison.stated(computed, known.unrecorded_with(recordings[0].arguments))


ADAPTER = PPOAdapter()
