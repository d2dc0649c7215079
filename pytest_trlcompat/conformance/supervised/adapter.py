"""How the adapters of trainers on the rows of a dataset record and compare.

Runs inside a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance import comparison, conventions, images, liger, weights
from pytest_trlcompat.conformance.adapter import TrainerAdapter, trainer_class
from pytest_trlcompat.conformance.supervised import comparing, quantities, recording
from pytest_trlcompat.conformance.supervised.hooks import SupervisedHooks
from pytest_trlcompat.conformance.supervised.records import Recording, Row

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["SupervisedAdapter"]


class SupervisedAdapter(TrainerAdapter):
    """A trainer on the rows of a dataset, by what its hooks say of it.

    The hooks are an object of their own, and its module does not import this one, so that a row passes from the driver
    to the hooks in one direction.
    """

    def __init__(self, hooks: SupervisedHooks) -> None:
        self.hooks = hooks

    @property
    def trainer(self) -> str:  # type: ignore[override] # of the hooks, where others have it on their class
        return self.hooks.trainer

    def unknown(self, setting: Mapping[str, Any]) -> list[str]:
        import trl

        return sorted(set(setting) - set(self.hooks.known_part(trl, setting)))

    def lacking(self, setting: Mapping[str, Any]) -> str:
        return liger.lacking(setting) or images.lacking(setting)

    def record(self, subject: str, model: TinyModel, setting: Mapping[str, Any], seed: int) -> tuple[Recording, None]:
        whole = weights.whole_trained if weights.is_sharded() else None
        return recording.record(
            self.hooks, trainer_class(subject, self.hooks.names[0]), model, setting, seed, whole
        ), None

    def compare(
        self, recordings: Sequence[Recording], untrained: Any, model: TinyModel, setting: Mapping[str, Any], seed: int
    ) -> comparison.Comparison:
        models = self.hooks.models(model, setting)

        arguments = recordings[0].arguments
        rows: dict[str, tuple[Sequence[Row], int]] = {}
        for part in quantities.parts_recorded(recordings):
            expected = self.hooks.expected_rows(model, setting, arguments, seed, part)
            rows[part] = expected, self.hooks.expected_size(expected, arguments, part)
        differences = self.hooks.extra_differences(recordings, models, model, setting, seed)
        known = conventions.of_installed(self.trainer)
        return comparing.compare_with_reference(recordings, self.hooks, models, known, rows, differences)
