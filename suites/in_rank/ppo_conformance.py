"""A PPO training with a setting, held against the reference. Runs inside the ranks.

Imports the stack only inside functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance import comparison, conventions
from pytest_trlcompat.conformance.ppo import quantities, truth

from . import ppo_recording
from .grpo_steps import of_all_ranks
from .sharding import failure

if TYPE_CHECKING:
    from pytest_trlcompat.conformance.comparison import Quantity
    from pytest_trlcompat.conformance.ppo.records import PPORecording
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["held"]


def held(subject: str, model: TinyModel, setting: Mapping[str, Any], seed: int, partly: bool) -> dict[str, Any]:
    """As :func:`suites.in_rank.conformance.hold` says of each setting. The first rank alone compares, for all ranks."""
    from pytest_trlcompat.trainers import PPOConfig

    unknown = sorted(set(setting) - {each.name for each in dataclasses.fields(PPOConfig)})
    found: dict[str, Any] = {"failure": None, "differences": [], "compared": 0, "unknown": unknown}
    if unknown and not partly:
        return found
    with failure() as training:
        recorded, before = ppo_recording.record(subject, model, setting, seed)
    if training:
        return {**found, "failure": training["text"]}
    every = of_all_ranks(recorded)
    return {**found, **_compared(every, before)} if recorded.rank == 0 else found


def _compared(recordings: list[PPORecording], before: truth.Untrained) -> dict[str, Any]:
    known = conventions.of_installed("ppo")
    every = int(recordings[0].arguments["logging_steps"])

    def expected(models: truth.Untrained) -> list[Quantity]:
        return list(quantities.expected_quantities(truth.computed(recordings, models, known), every))

    def neighbours() -> list[list[Quantity]]:
        return [
            expected(dataclasses.replace(before, policy=policy, value_model=value_model))
            for policy, value_model in comparison.neighbours(before.policy, before.value_model)
        ]

    try:
        wanted = expected(before)
    except comparison.OutOfStep as error:
        return {"differences": [{"stage": "updates", "where": "", "said": str(error)}]}
    found = quantities.recorded_quantities(recordings)
    differences = comparison.differing(wanted, found, neighbours)
    return {
        "differences": [vars(each) for each in differences],
        "compared": sum((one.stage, one.where) in found for one in wanted),
    }
