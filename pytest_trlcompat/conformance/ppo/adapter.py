"""PPO's adapter.

Runs inside a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_trlcompat.conformance.comparison import Quantity
from pytest_trlcompat.conformance.conventions import Conventions
from pytest_trlcompat.conformance.on_policy.adapter import (
    OnPolicyAdapter,
    is_measured_before_steps,
    logging_steps,
    rows_of_batch,
    unknown_fields,
)
from pytest_trlcompat.conformance.on_policy.records import OnPolicyRecording
from pytest_trlcompat.conformance.ppo import expected, objects, quantities, recording

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["ADAPTER"]


class PPOAdapter(OnPolicyAdapter):
    trainer: ClassVar[str] = "ppo"
    trained: ClassVar[tuple[str, ...]] = ("policy", "value_model")

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

    def expected(self, recordings: Sequence[OnPolicyRecording], untrained: Any, known: Conventions) -> list[Quantity]:
        steps = expected.computed(recordings, untrained, known)
        rows = rows_of_batch(recordings) if is_measured_before_steps() else None
        return list(quantities.expected_quantities(steps, logging_steps(recordings), rows))

    def recorded(self, recordings: Sequence[OnPolicyRecording]) -> Mapping[tuple[str, str], Any]:
        return quantities.recorded_quantities(recordings)


ADAPTER = PPOAdapter()
