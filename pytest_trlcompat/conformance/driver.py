"""Train with several settings, one after the other, and compare each training with the reference.

This is the same for all trainers; what differs is in their adapters.

Runs inside the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance import liger, refusals, sequential
from pytest_trlcompat.conformance.adapter import TrainerAdapter
from pytest_trlcompat.conformance.comparison import StepCountMismatch, ToleranceUnknown
from pytest_trlcompat.conformance.supervised.adapter import SupervisedAdapter
from pytest_trlcompat.conformance.supervised.hooks import SupervisedHooks
from pytest_trlcompat.conformance.training import of_all_ranks

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["adapter_of", "compare_with_reference"]

_SHOWN = 40
"""How many differences are returned at most: those of the first step say enough."""


def adapter_of(trainer: str) -> TrainerAdapter:
    """The adapter of a trainer: what its folder registers as ``ADAPTER``, or what drives those hooks.

    Args:
        trainer: one of :data:`~pytest_trlcompat.conformance.rows.TRAINERS`.
    """
    registered: TrainerAdapter | SupervisedHooks = import_module(f"{__package__}.{trainer}.adapter").ADAPTER
    return SupervisedAdapter(registered) if isinstance(registered, SupervisedHooks) else registered


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
        partly: names of settings that are tried without the values that this release does not know. Any other setting
            with such a value is not tried.

    Returns:
        By setting, a dictionary. ``failure``: the error that ended the training, or ``None``. ``differences``: each
        with ``stage``, ``where``, ``expected``, ``found``, ``off`` and ``allowed``, in the order of the training.
        ``compared``: the number of quantities. ``unseen``, ``without_reference`` and ``shortfall``: see
        :class:`~pytest_trlcompat.conformance.comparison.Comparison`. ``unknown``: names in the setting that this
        release does not know. ``lacking``, where a package is not installed or rounding hides everything: the reason.
        Settings after one in which ranks failed differently are missing: see :func:`.sequential.in_turn`.

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
    # Other ranks return here, after the last collective: the comparison is the same for all of them.
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
    """Join the process group, as a training does first.

    A launch demands it of its ranks, also where the release knows no setting, so that none of them trains.
    """
    from accelerate import PartialState

    PartialState()
