"""Which rows show a fault before it was mended, and no longer after. Needs no stack."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["Shown", "changed", "gone", "share", "stages_of", "troubled"]

Shown = Mapping[str, Mapping[str, Any]]
"""By label of a row, what it shows: ``failure``, ``differing`` (numbers by stage), ``absent``, or nothing."""


def troubled(shown: Shown) -> list[str]:
    """Rows that show anything."""
    return [label for label, each in shown.items() if stages_of(each)]


def stages_of(shown: Mapping[str, Any]) -> set[str]:
    """What a row shows: stages that differ, or the exception that ended its training."""
    if "failure" in shown:
        return {f"exception: {shown['failure']}"}
    return set(shown.get("differing", ()))


def gone(before: Shown, after: Shown, only: Sequence[str] = ()) -> dict[str, list[str]]:
    """By row, what it shows before and no longer after.

    A row that is not tried after, or that ends there with another exception, says nothing: it hides what would differ.

    Args:
        only: how names of stages begin that count; empty: all do.
    """
    found = {}
    for label, each in before.items():
        later = after.get(label, {"absent": []})
        if "absent" in later or ("failure" in later and stages_of(later) != stages_of(each)):
            continue
        left = sorted(stages_of(each) - stages_of(later))
        if left := [stage for stage in left if not only or stage.startswith(tuple(only))]:
            found[label] = left
    return found


def changed(before: Shown, after: Shown) -> dict[str, list[str]]:
    """By row, what differs before and after, by other numbers: another fault is there as well, and remains."""
    found = {}
    for label, each in before.items():
        one, other = each.get("differing", {}), after.get(label, {}).get("differing", {})
        if stages := [stage for stage in one if stage in other and _found(one[stage]) != _found(other[stage])]:
            found[label] = stages
    return found


def _found(numbers: Mapping[str, Any]) -> Any:
    """Where a stage differs first, and what is found there: numbers to four places."""
    found = numbers.get("found", numbers.get("said"))
    values = found if isinstance(found, list) else [found]
    return numbers.get("where"), [f"{each:.4g}" if isinstance(each, float) else each for each in values]


def share(answers: Iterable[bool]) -> str:
    """``12 of 15 (80 %)``."""
    every = list(answers)
    return f"{sum(every)} of {len(every)}" + (f" ({100 * sum(every) / len(every):.0f} %)" if every else "")
