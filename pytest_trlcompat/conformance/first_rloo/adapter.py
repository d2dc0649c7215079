"""The adapter of the legacy RLOO.

Runs inside a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_trlcompat.conformance import comparison, conventions
from pytest_trlcompat.conformance.adapter import TrainerAdapter
from pytest_trlcompat.conformance.comparison import Quantity
from pytest_trlcompat.conformance.conventions import Conventions
from pytest_trlcompat.conformance.first_rloo import expected, objects, quantities, recording
from pytest_trlcompat.conformance.on_policy.adapter import (
    differences_before_steps,
    is_measured_before_steps,
    logging_steps,
    neighbours,
    rows_of_batch,
    unknown_fields,
)
from pytest_trlcompat.conformance.on_policy.records import OnPolicyRecording

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["ADAPTER"]


_TRAINED = ("policy",)
"""Fields of the untrained models that are trained."""


class LegacyRLOOAdapter(TrainerAdapter):
    trainer: ClassVar[str] = "first_rloo"

    def absence(self) -> str:
        return objects.absence()

    def unknown(self, setting: Mapping[str, Any]) -> list[str]:
        fields = {name: value for name, value in setting.items() if name not in recording.AXES}
        return [*unknown_fields(fields, objects.config_class()), *recording.unknown(setting)]

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
    arguments = recordings[0].arguments
    updates = int(arguments["num_ppo_epochs"]) * int(arguments["num_mini_batches"])
    # Transformers makes an enumeration of the text, which `str` writes with the name of its class.
    strategy = str(getattr(arguments["save_strategy"], "value", arguments["save_strategy"]))
    prompts = int(arguments["local_batch_size"]) * len(recordings) / int(arguments["rloo_k"])
    computed = quantities.expected_quantities(
        expected.computed(recordings, untrained, known),
        logging_steps(recordings),
        rows_of_batch(recordings),
        prompts / recordings[0].prompts if is_measured_before_steps() else None,
        int(arguments["save_steps"]) if strategy == "steps" and updates == 1 else 0,
    )
    return comparison.stated([*computed], known.unrecorded_with(arguments))


ADAPTER = LegacyRLOOAdapter()
