"""Train with each of some settings, and compare with the reference: the same for all trainers.

Runs inside the ranks; imports the stack only inside functions.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance import liger, refusals, sequential
from pytest_trlcompat.conformance.adapter import TrainerAdapter
from pytest_trlcompat.conformance.comparison import StepCountMismatch, ToleranceUnknown
from pytest_trlcompat.conformance.training import of_all_ranks

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["adapter_of", "compare_with_reference"]

_SHOWN = 40
"""Differences that are returned: those of the first step say enough."""


def adapter_of(trainer: str) -> TrainerAdapter:
    """The adapter that a trainer's folder registers as ``ADAPTER``.

    Args:
        trainer: one of :data:`~pytest_trlcompat.conformance.rows.TRAINERS`.
    """
    adapter: TrainerAdapter = import_module(f"{__package__}.{trainer}.adapter").ADAPTER
    return adapter


def compare_with_reference(
    trainer: str,
    subject: str,
    model: TinyModel,
    settings: Mapping[str, Mapping[str, Any]],
    seed: int = 0,
    partly: Collection[str] = (),
) -> dict[str, dict[str, Any]]:
    """Train with each setting, and compare.

    Args:
        trainer: one of :data:`~pytest_trlcompat.conformance.rows.TRAINERS`.
        subject: ``upstream`` or ``corrected``.
        seed: of the data.
        partly: settings that are tried without what this release does not know; any other one then is not.

    Returns:
        By setting: ``failure``, what the training ended in; ``differences``, each with ``stage``, ``where``,
        ``expected``, ``found``, ``off`` and ``allowed``, the first one first; ``compared``, how many quantities;
        ``unseen``, ``unheld`` and ``shortfall``, see :class:`~pytest_trlcompat.conformance.comparison.Comparison`; and
        ``unknown``, what of the setting this release does not know; and, where something that it needs is not
        installed, or rounding hides everything, ``lacking``, what to say of it. Where ranks fail differently, the rest
        is missing: see :func:`.sequential.in_turn`.

    Raises:
        RankDesynchronised: other ranks wait for this one, which failed.
    """
    adapter = adapter_of(trainer)
    results: dict[str, dict[str, Any]] = {}
    for name in sequential.in_turn(settings, results):
        with liger.uncompiled(settings[name]):
            results[name] = _compare_row(adapter, subject, model, settings[name], seed, name in partly)
    if all(result["unknown"] for result in results.values()):
        _meet()
    return results


def _compare_row(
    adapter: TrainerAdapter, subject: str, model: TinyModel, setting: Mapping[str, Any], seed: int, partly: bool
) -> dict[str, Any]:
    """Train with one setting. The first rank alone compares, for all ranks."""
    unknown = adapter.unknown(setting)
    result: dict[str, Any] = {"failure": None, "differences": [], "compared": 0, "unknown": unknown}
    if unknown and not partly:
        return result
    known = {name: value for name, value in setting.items() if name not in unknown}
    if lacking := adapter.lacking(known):
        return {**result, "lacking": lacking}
    with sequential.training() as training:
        recording, untrained = adapter.record(subject, model, setting, seed)
    if (ended := refusals.result_without_numbers(setting, training)) is not None:
        return {**result, **ended}
    recordings = of_all_ranks(recording)
    if int(os.environ.get("RANK", "0")):
        return result
    try:
        comparison = adapter.compare(recordings, untrained, model, known, seed)
    except StepCountMismatch as error:
        return {**result, "differences": [{"stage": adapter.mismatch_stage, "where": "", "said": str(error)}]}
    except ToleranceUnknown as error:  # in bfloat16, say, of a loss whose terms cancel
        reason = f"rounding changes the first step so much that nothing can be told: {error}"
        return {"failure": None, "differences": [], "compared": 0, "unknown": [], "lacking": reason}
    differences = [vars(difference) for difference in comparison.differences[:_SHOWN]]
    return {**result, **comparison._asdict(), "differences": differences, "shortfall": comparison.shortfall()}


def _meet() -> None:
    """What a training does first: a release that knows no setting of a launch has none, and a launch demands it."""
    from accelerate import PartialState

    PartialState()
