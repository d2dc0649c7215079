"""PPO trainings with settings, each held against the reference. Runs inside the ranks.

Imports the stack only inside functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance import comparison, conventions, ppo_quantities, ppo_truth

from . import ppo_recording
from .grpo_steps import of_all_ranks
from .sharding import failure

if TYPE_CHECKING:
    from pytest_trlcompat.conformance.comparison import Quantity
    from pytest_trlcompat.conformance.ppo_records import PPORecording
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["hold"]

_SHOWN = 40
"""Differences that are returned: those of the first batch say enough."""


def hold(
    subject: str,
    model: TinyModel,
    settings: Mapping[str, Mapping[str, Any]],
    seed: int = 0,
    partly: Collection[str] = (),
) -> dict[str, dict[str, Any]]:
    """Train with each setting, and compare.

    Args:
        partly: settings that are tried without what this release does not know; any other one then is not.

    Returns:
        By setting: ``failure``, what the training ended in; ``differences``, each with ``stage``, ``where``,
        ``expected``, ``found``, ``off`` and ``allowed``, the first one first; ``compared``, how many quantities; and
        ``unknown``, what of the setting this release does not know. The first rank alone compares, for all ranks.
    """
    return {name: _held(subject, model, setting, seed, name in partly) for name, setting in settings.items()}


def _held(subject: str, model: TinyModel, setting: Mapping[str, Any], seed: int, partly: bool) -> dict[str, Any]:
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


def _compared(recordings: list[PPORecording], before: ppo_truth.Untrained) -> dict[str, Any]:
    from importlib import metadata

    import transformers

    known = conventions.of_release("ppo", metadata.version("trl"), transformers.__version__)
    every = int(recordings[0].arguments["logging_steps"])

    def expected(models: ppo_truth.Untrained) -> list[Quantity]:
        return list(ppo_quantities.expected_quantities(ppo_truth.computed(recordings, models, known), every))

    def neighbours() -> list[list[Quantity]]:
        return [
            expected(dataclasses.replace(before, policy=policy, value_model=value_model))
            for policy, value_model in comparison.neighbours(before.policy, before.value_model)
        ]

    try:
        wanted = expected(before)
    except comparison.OutOfStep as error:
        return {"differences": [{"stage": "updates", "where": "", "said": str(error)}]}
    found = ppo_quantities.recorded_quantities(recordings)
    differences = comparison.differing(wanted, found, neighbours)
    return {
        "differences": [vars(each) for each in differences[:_SHOWN]],
        "compared": sum((one.stage, one.where) in found for one in wanted),
    }
