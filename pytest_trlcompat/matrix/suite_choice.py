"""Which tests of the suites a sweep runs in a cell, as an expression of pytest's option ``-m``.

A cell with vLLM, Liger or Pillow runs only the suites that need it, and no other cell runs these. A full sweep leaves
out what is measured on demand. Any other sweep also leaves out rows that hold pairs of settings, and what takes a
minute. Its default cells, which are to end in minutes, also leave out rows of the conformance suites whose settings
other rows have as well.

Of the default cells, the newest runs all that remains, except three quarters of the conformance suites' rows with the
corrected trainers. Every other default cell runs a part. Together they measure every known issue that has a suite of
its own in two cells, every label of it, and everything known that a row of the conformance suites shows. Rows that show
nothing known are left to the newest release: in an older one only a change of this package can make them wrong. See
:func:`parts_of`.
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
    "newest_of",
    "part_of_cell",
    "parts_of",
]

EVERY_PAIR, ON_DEMAND = "every_pair", "on_demand"
"""Markers of the suites' tests. A sweep of the default cells leaves out the first, rows that hold pairs of settings or
tests that take a minute; every sweep leaves out the second, unless it asks for their issue."""
NOT_DEFAULT = "not_default"
"""Marker of tests that a sweep leaves out of its default cells, and runs in any other."""
PARTS = tuple(f"part_{number}" for number in range(1, 9))
"""Markers of the tests that are run in a default cell of each part."""
ONLY_OLDER = "only_older"
"""Marker of rows with a corrected trainer that a sweep of the default cells tries in an older one alone."""
ONLY_NEWEST = "only_newest"
"""Marker of tests that a sweep of the default cells runs in the newest of them alone."""
PARTS_OF_NEWEST = PARTS[::4]
"""Parts of the conformance suites' rows that the newest default cell tries with the corrected trainers as well."""
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
    if full or cell.id not in {other.id for other in default}:
        return everywhere
    part = part_of_cell(cell, default)
    return f"{everywhere} and not {NOT_DEFAULT} and {f'not {ONLY_NEWEST} and {part}' if part else f'not {ONLY_OLDER}'}"


def part_of_cell(cell: Cell, default: Sequence[Cell]) -> str | None:
    """Which of :data:`PARTS` a default cell runs; ``None``: all, as the newest of them and any other cell does."""
    newest = newest_of(default)
    ids = [other.id for other in default if newest is None or other.id != newest.id]
    return PARTS[ids.index(cell.id) % len(PARTS)] if cell.id in ids else None


def parts_of(issue: str, label: str | None, folder: str = "") -> tuple[str, ...]:
    """The parts in which one label of a known issue is measured.

    An issue is measured in two of the parts: its labels of one process in both, those with ranks in the later one.

    Args:
        issue: its id, which decides in which parts, where ``folder`` does not.
        label: one of those of the issue, a strategy first: ``zero3``, ``zero3-lora``; ``None``: of a test for none.
        folder: of the suites, whose launches other issues in it may share.
    """
    # Not hash(), which differs from process to process.
    earlier, later = _QUARTERS[_TOGETHER.get(folder, zlib.crc32(issue.encode()) % len(_QUARTERS))]
    alone = label is None or label.partition("-")[0] == "single"
    return (PARTS[earlier], PARTS[later]) if alone else (PARTS[later],)


def newest_of(cells: Sequence[Cell]) -> Cell | None:
    """The cell with the newest release of TRL, and of Transformers among several; ``None`` of no cells."""
    return max(cells, key=_age, default=None)


def _age(cell: Cell) -> tuple[Version, Version]:
    return Version(cell.pins.get("trl", "0")), Version(cell.pins.get("transformers", "0"))
