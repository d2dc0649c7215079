"""A training on the rows of a dataset with a setting, held against the reference. Runs inside the ranks.

Imports the stack only inside functions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance import comparison, conventions, images, liger
from pytest_trlcompat.conformance.supervised import holding, recording

from . import in_step
from .grpo_conformance import gathering, reported, trainer_class, without_numbers
from .grpo_steps import of_all_ranks

if TYPE_CHECKING:
    from pytest_trlcompat.conformance.supervised.records import Recording, Row
    from pytest_trlcompat.conformance.supervised.room import Room
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["held"]


def held(
    room: Room, subject: str, model: TinyModel, setting: Mapping[str, Any], seed: int, partly: bool
) -> dict[str, Any]:
    """As :func:`suites.in_rank.conformance.hold` says of each setting. The first rank alone compares, for all ranks."""
    import trl

    known = room.known_part(trl, setting)
    unknown = sorted(set(setting) - set(known))
    found: dict[str, Any] = {"failure": None, "differences": [], "compared": 0, "unknown": unknown}
    if unknown and not partly:
        return found
    if lacking := liger.lacking(known) or images.lacking(known):
        return {**found, "lacking": lacking}
    with in_step.training() as training:
        kind = trainer_class(subject, room.names[0])
        recorded = recording.record(room, kind, model, setting, seed, whole=gathering())
    if (ended := without_numbers(setting, training)) is not None:
        return {**found, **ended}
    recordings = of_all_ranks(recorded)
    if int(os.environ.get("RANK", "0")):
        return found
    return {**found, **_compared(room, recordings, model, known, seed)}


def _compared(
    room: Room, recordings: list[Recording], model: TinyModel, setting: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    models = room.models(model, setting)

    def rows(part: str) -> tuple[Sequence[Row], int]:
        arguments = recordings[0].arguments
        found = room.expected_rows(model, setting, arguments, seed, part)
        return found, room.expected_size(found, arguments, part)

    try:
        beside = room.beside(recordings, models, model, setting, seed)
        known = conventions.of_installed(room.trainer)
        return reported(holding.held(recordings, room, models, known, rows, beside))
    except comparison.OutOfStep as error:
        return {"differences": [{"stage": "updates", "where": "", "said": str(error)}]}
