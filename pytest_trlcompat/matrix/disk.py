"""Room on the disk for builds of torch, which take gigabytes each: told before a sweep, made during it.

Imports only the standard library and this room.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Sequence

from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.environments import drop_unused, remove, standing
from pytest_trlcompat.matrix.errors import Untestable
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock, kept
from pytest_trlcompat.matrix.torch_builds import needs

__all__ = ["announcement", "free", "make_room"]

_MARGIN = 2_000_000_000
"""Bytes for the rest of an environment, for results and for temporary files."""


def announcement(matrix: Matrix, cells: Iterable[Cell], layout: Layout) -> str | None:
    """What the builds of torch that cells need and this machine lacks take; ``None`` where it lacks none.

    Torch is asked about where the cell's environment does not stand.
    """
    torches: dict[str, list[str]] = {}
    for cell in cells:
        torch = matrix.all_pins(cell).get("torch")
        if torch is not None and not _stands(matrix, cell, layout):
            torches.setdefault(matrix.python_of(cell), []).append(torch)
    try:
        missing = [need for python, wanted in torches.items() for need in needs(wanted, python, layout)]
    except Untestable:
        missing = []  # each cell tells its own reason
    if not missing:
        return None
    named = ", ".join(f"torch {need.torch} ({_gigabytes(need.size)})" for need in missing)
    needed, room = sum(need.size for need in missing), free(layout)
    told = (
        f"not on this machine yet: {named}; together they need about {_gigabytes(needed)} of disk, "
        f"{_gigabytes(room)} are free"
    )
    if room > needed + _MARGIN:
        return told
    return (
        f"{told}; where it runs out, environments of finished cells are removed, "
        "and a cell that still finds no room is left unfinished"
    )


def make_room(
    lock: Lock, layout: Layout, finished: Sequence[Lock], wanted: Sequence[Lock], say: Callable[[str], None]
) -> None:
    """Remove environments of finished cells, oldest first, until there is room for that of ``lock``, or none is left.

    Args:
        finished: cells of this sweep that have ended, in the order in which they did.
        wanted: cells that this sweep comes to later, whose environments stay.

    Raises:
        MatrixError: when one cannot be removed.
    """
    if "torch" not in lock.packages or standing(lock, layout) is not None:
        return
    needed = _MARGIN
    with contextlib.suppress(Untestable):  # that is told when it is built
        needed += sum(need.size for need in needs([lock.packages["torch"]], lock.python, layout))
    still = (lock, *wanted)
    for each in finished:
        if free(layout) > needed:
            break
        if each.digest not in {other.digest for other in still} and remove(each, layout, say):
            say(f"{each.cell_id}: finished, its environment is removed to make room")
            drop_unused(layout, say, still)


def free(layout: Layout) -> int:
    """Bytes on the disk of the environments."""
    folder = next(path for path in (layout.environments, *layout.environments.parents) if path.exists())
    return shutil.disk_usage(folder).free


def _stands(matrix: Matrix, cell: Cell, layout: Layout) -> bool:
    lock = kept(matrix, cell, layout)
    return lock is not None and standing(lock, layout) is not None


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
