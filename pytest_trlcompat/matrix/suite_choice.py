"""Which tests of the suites a sweep runs in a cell, as an expression of pytest's option ``-m``.

A cell that has vLLM, Liger or Pillow beside the stack runs the suites that need it alone, and no other cell runs these.
A full sweep leaves out what is measured on demand. Any other sweep also leaves out what holds pairs of settings, or
takes a minute, and its default cells, which are to end in minutes, rows of the conformance suites whose settings other
rows have as well. The newest of them runs all that remains, but for three quarters of the conformance suites' rows with
the corrected trainers, and every other one a part: together they cover every known issue with a suite of its own in two
of them, every label of it, and what every row of the conformance suites shows that is known. Rows that show nothing
known are left to the newest release: in an older one they can only become wrong by a change of this package. See
:func:`parts_of`.

Imports only the standard library and packaging.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from packaging.version import Version

from pytest_trlcompat.matrix.cells import ADDED_TAGS, Cell

__all__ = [
    "EVERY_PAIR",
    "NOT_DEFAULT",
    "ONLY_NEWEST",
    "ONLY_OLDER",
    "ON_DEMAND",
    "PARTS",
    "PARTS_OF_NEWEST",
    "chosen_tests",
    "part_of_cell",
    "parts_of",
]

EVERY_PAIR, ON_DEMAND = "every_pair", "on_demand"
"""Markers of the suites' tests that a sweep of the default cells leaves out, rows that hold pairs of settings or what
takes a minute, and that every sweep does, unless it is of their issue."""
NOT_DEFAULT = "not_default"
"""Marker of tests that a sweep leaves out of its default cells, and runs in any other."""
PARTS = tuple(f"part_{number}" for number in range(1, 9))
"""Markers of the tests that are run in a default cell of each part."""
ONLY_OLDER = "only_older"
"""Marker of rows with a corrected trainer that a sweep of the default cells tries in an older one alone."""
ONLY_NEWEST = "only_newest"
"""Marker of tests that a sweep of the default cells runs in the newest of them alone."""
PARTS_OF_NEWEST = PARTS[::4]
"""Parts of the conformance suites' rows that the newest default cell, too, tries with the corrected trainers."""
_QUARTERS = ((0, 7), (1, 6), (2, 5), (3, 4))
"""Parts that measure a quarter of the known issues each: that of an earlier default cell, and that of a later one."""
_TOGETHER = {"ppo": 0, "adapters": 1, "sharding": 2}
"""Which of them measures all known issues of a folder of suites: they judge the same launches."""


def chosen_tests(cell: Cell, default: Sequence[Cell], *, full: bool) -> str:
    """The tests of a cell in a sweep of the default cells, or in a ``full`` one.

    Args:
        default: the default cells, in order. A cell that is none of them tries all rows.
    """
    for tag in ADDED_TAGS:
        if tag in cell.tags:
            return f"{tag} and not {ON_DEMAND}"
    everywhere = " and ".join(f"not {marker}" for marker in (ON_DEMAND, *ADDED_TAGS, *([] if full else [EVERY_PAIR])))
    if full or cell.id not in {each.id for each in default}:
        return everywhere
    part = part_of_cell(cell, default)
    return f"{everywhere} and not {NOT_DEFAULT} and {f'not {ONLY_NEWEST} and {part}' if part else f'not {ONLY_OLDER}'}"


def part_of_cell(cell: Cell, default: Sequence[Cell]) -> str | None:
    """Which of :data:`PARTS` a default cell runs; ``None``: all, as the newest of them and any other cell does."""
    newest = max(default, key=_age, default=None)
    ids = [each.id for each in default if newest is None or each.id != newest.id]
    return PARTS[ids.index(cell.id) % len(PARTS)] if cell.id in ids else None


def parts_of(issue: str, label: str | None, folder: str = "") -> tuple[str, ...]:
    """The parts in which one label of a known issue is measured.

    An issue is measured in two of the parts: what of it runs in one process in both, and what has ranks in the later
    one.

    Args:
        issue: its id, which decides in which parts, where ``folder`` does not.
        label: one of those of the issue, a strategy first: ``zero3``, ``zero3-lora``; ``None``: of a test for none.
        folder: of the suites, whose launches other issues in it may share.
    """
    earlier, later = _QUARTERS[_TOGETHER.get(folder, zlib.crc32(issue.encode()) % len(_QUARTERS))]
    alone = label is None or label.partition("-")[0] == "single"
    return (PARTS[earlier], PARTS[later]) if alone else (PARTS[later],)


def _age(cell: Cell) -> tuple[Version, Version]:
    return Version(cell.pins.get("trl", "0")), Version(cell.pins.get("transformers", "0"))
