"""Which tests of the suites a sweep runs in a cell, as an expression of pytest's option ``-m``.

A cell that has vLLM or Liger beside the stack runs the suites that need it alone, and no other cell runs these. A full
sweep leaves out what is measured on demand. One of the default cells, which is to end in minutes, also
leaves out what holds pairs of settings, and divides the conformance suites' rows among the cells: the newest cell tries
all rows, and each other cell a part, so that with as many cells as parts every row is tried with some older release.

Imports only the standard library, packaging, and the names of the parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from packaging.version import Version

from pytest_trlcompat.conformance.rows import PARTS
from pytest_trlcompat.matrix.cells import ADDED_TAGS, Cell

__all__ = ["EVERY_PAIR", "ON_DEMAND", "chosen_tests", "parts_in"]

EVERY_PAIR, ON_DEMAND = "every_pair", "on_demand"
"""Markers of the suites' tests that a sweep of the default cells leaves out, rows that hold pairs of settings, and that
every sweep does, unless it is of their issue: they take a minute each."""


def chosen_tests(cell: Cell, default: Sequence[Cell], *, full: bool) -> str:
    """The tests of a cell in a sweep of the default cells, or in a ``full`` one.

    Args:
        default: the default cells, in order. A cell that is none of them tries all rows.
    """
    for tag in ADDED_TAGS:
        if tag in cell.tags:
            return f"{tag} and not {ON_DEMAND}"
    elsewhere = [part for part in PARTS if part not in parts_in(cell, default)]
    few = [] if full else [EVERY_PAIR, *elsewhere]
    return " and ".join(f"not {marker}" for marker in (ON_DEMAND, *ADDED_TAGS, *few))


def parts_in(cell: Cell, default: Sequence[Cell]) -> tuple[str, ...]:
    """The parts of the rows that are tried in a cell."""
    newest = max(default, key=_age, default=None)
    ids = [each.id for each in default if newest is None or each.id != newest.id]
    return (PARTS[ids.index(cell.id) % len(PARTS)],) if cell.id in ids else PARTS


def _age(cell: Cell) -> tuple[Version, Version]:
    return Version(cell.pins.get("trl", "0")), Version(cell.pins.get("transformers", "0"))
