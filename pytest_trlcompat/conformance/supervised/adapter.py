"""How the adapters of trainers on the rows of a dataset record and compare.

Runs inside a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance import comparison, conventions, images, liger, weights
from pytest_trlcompat.conformance.adapter import trainer_class
from pytest_trlcompat.conformance.supervised import comparing, recording
from pytest_trlcompat.conformance.supervised.hooks import SupervisedHooks
from pytest_trlcompat.conformance.supervised.records import Recording, Row

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["SupervisedAdapter"]


class SupervisedAdapter(SupervisedHooks):
    """A trainer on the rows of a dataset; subclasses say what :class:`.SupervisedHooks` asks for."""

    def unknown(self, setting: Mapping[str, Any]) -> list[str]:
        import trl

        return sorted(set(setting) - set(self.known_part(trl, setting)))

    def lacking(self, setting: Mapping[str, Any]) -> str:
        return liger.lacking(setting) or images.lacking(setting)

    def record(self, subject: str, model: TinyModel, setting: Mapping[str, Any], seed: int) -> tuple[Recording, None]:
        whole = weights.whole_trained if weights.is_sharded() else None
        return recording.record(self, trainer_class(subject, self.names[0]), model, setting, seed, whole), None

    def compare(
        self, recordings: Sequence[Recording], untrained: Any, model: TinyModel, setting: Mapping[str, Any], seed: int
    ) -> comparison.Comparison:
        models = self.models(model, setting)

        def rows(part: str) -> tuple[Sequence[Row], int]:
            arguments = recordings[0].arguments
            expected = self.expected_rows(model, setting, arguments, seed, part)
            return expected, self.expected_size(expected, arguments, part)

        differences = self.extra_differences(recordings, models, model, setting, seed)
        known = conventions.of_installed(self.trainer)
        return comparing.compare_with_reference(recordings, self, models, known, rows, differences)
