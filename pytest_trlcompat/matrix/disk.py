"""Disk space for builds of torch, which take gigabytes each: reported before a sweep, freed during it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Sequence

from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.environments import drop_unused, existing, remove
from pytest_trlcompat.matrix.errors import Untestable
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock, kept
from pytest_trlcompat.matrix.torch_builds import needs

__all__ = ["announcement", "available", "free_space"]

_MARGIN = 2_000_000_000
"""Bytes for the rest of an environment, results and temporary files."""


def announcement(matrix: Matrix, cells: Iterable[Cell], layout: Layout) -> str | None:
    """A line about the builds of torch that are missing here and how much disk space they need; ``None`` if none is.

    Cells whose environment exists already need none.
    """
    torches: dict[str, list[str]] = {}
    for cell in cells:
        torch = matrix.all_pins(cell).get("torch")
        if torch is not None and not _exists(matrix, cell, layout):
            torches.setdefault(matrix.python_of(cell), []).append(torch)
    try:
        missing = [need for python, releases in torches.items() for need in needs(releases, python, layout)]
    except Untestable:
        # The cell itself reports the reason when it runs.
        missing = []
    if not missing:
        return None
    named = ", ".join(f"torch {need.torch} ({_gigabytes(need.size)})" for need in missing)
    needed, free = sum(need.size for need in missing), available(layout)
    text = (
        f"not on this machine yet: {named}; together they need about {_gigabytes(needed)} of disk space, "
        f"{_gigabytes(free)} are free"
    )
    if free > needed + _MARGIN:
        return text
    return (
        f"{text}; if it runs out, environments of finished cells are removed, "
        "and a cell for which there is still not enough is left unfinished"
    )


def free_space(
    lock: Lock, layout: Layout, finished: Sequence[Lock], later: Sequence[Lock], say: Callable[[str], None]
) -> None:
    """Remove environments of finished cells, oldest first, until that of ``lock`` fits, or none is left.

    Args:
        finished: cells of this sweep that have ended, in the order in which they did.
        later: cells that this sweep runs later; their environments stay.

    Raises:
        MatrixError: when an environment cannot be removed.
    """
    # Torch alone takes gigabytes, and an environment that is there already needs nothing more.
    if "torch" not in lock.packages or existing(lock, layout) is not None:
        return
    needed = _MARGIN
    with contextlib.suppress(Untestable):  # reported when the environment is built
        needed += sum(need.size for need in needs([lock.packages["torch"]], lock.python, layout))
    in_demand = (lock, *later)
    for finished_lock in finished:
        if available(layout) > needed:
            break
        if finished_lock.digest not in {other.digest for other in in_demand} and remove(finished_lock, layout, say):
            say(f"{finished_lock.cell_id}: finished; its environment is removed to free disk space")
            # Files that environments share by hard links take space until the last of these is gone.
            drop_unused(layout, say, in_demand)


def available(layout: Layout) -> int:
    """Free bytes on the disk of the environments."""
    # Before the first environment is built its folder is missing; the nearest one above is on the same disk.
    folder = next(path for path in (layout.environments, *layout.environments.parents) if path.exists())
    return shutil.disk_usage(folder).free


def _exists(matrix: Matrix, cell: Cell, layout: Layout) -> bool:
    lock = kept(matrix, cell, layout)
    return lock is not None and existing(lock, layout) is not None


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
