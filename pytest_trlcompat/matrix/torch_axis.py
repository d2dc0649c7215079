"""Torch as an axis of the matrix: which torch each cell of a sweep gets, the default one or another."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Sequence

from packaging.version import InvalidVersion, Version

from pytest_trlcompat.matrix.cells import PAIRS_TAG, Cell, Matrix, age
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import kept_date
from pytest_trlcompat.matrix.parsing import parse_pins

__all__ = [
    "DATED",
    "OPTION",
    "cells_with_kept_locks",
    "find",
    "older_than_supported",
    "requested_torch",
    "selection",
    "with_torch",
]

OPTION = "--torch"
"""Of the sessions ``matrix`` and ``cell``, after ``--``: :data:`DATED`, or one version for every cell."""

DATED = "dated"
"""Every cell gets the newest torch as of its own date."""

_PIN = re.compile(r"-torch([0-9][^-]*)")


def requested_torch(arguments: Sequence[str]) -> str | None:
    """The value of ``--torch`` among the arguments of a session; ``None`` without it."""
    # Without the parser, as in requested_pairwise: nox asks for sessions that other arguments belong to, too.
    for index, argument in enumerate(arguments):
        if argument == OPTION:
            return "".join(arguments[index + 1 : index + 2])
        if argument.startswith(f"{OPTION}="):
            return argument.partition("=")[2]
    return None


def selection(
    matrix: Matrix,
    layout: Layout,
    *,
    full: bool = False,
    pairwise: int = 0,
    torch: str | None = None,
    added: str = "",
) -> tuple[Cell, ...]:
    """The cells of a sweep.

    Args:
        full: the full selection instead of the default cells.
        pairwise: the cells of covering arrays of this strength instead of them, or after the full selection.
        torch: :data:`DATED` gives each cell the torch of its date, and adds the cells with that tag; a version gives
            every cell that one; ``None`` keeps the default pin.
        added: one of :data:`~pytest_trlcompat.matrix.cells.ADDED_TAGS`: its cells, and no others.

    Returns:
        With another torch, cells with the same one are consecutive, so that its build can be removed after the last.

    Raises:
        MatrixError: see :func:`with_torch`; and for ``added`` together with another selection or another torch.
    """
    if added:
        if full or pairwise or torch is not None:
            raise MatrixError(
                f"--{added} is a selection of its own, whose cells have the torch that they were chosen for"
            )
        return matrix.with_added(added)
    cells = matrix.full() if full else () if pairwise else matrix.default()
    if pairwise:
        cells = (*cells, *sorted(matrix.pairwise(pairwise), key=age))
    if torch is None:
        return cells
    if torch == DATED and not pairwise:
        cells = tuple({cell.id: cell for cell in (*cells, *matrix.tagged_dated())}.values())
    changed = {cell.id: cell for cell in (with_torch(matrix, layout, cell, torch) for cell in cells)}
    return tuple(sorted(changed.values(), key=lambda cell: (Version(matrix.all_pins(cell)["torch"]), age(cell))))


def with_torch(matrix: Matrix, layout: Layout, cell: Cell, torch: str) -> Cell:
    """The cell with another torch; the same cell if that is the default pin.

    Args:
        torch: a version, or :data:`DATED`: the newest of the matrix's releases as of the cell's date, or the oldest
            of them for an older cell; a torch that the cell itself pins then stays.

    Raises:
        MatrixError: for a malformed version; with :data:`DATED`, if the cell's date or all releases are unknown.
    """
    day = cell.date or kept_date(cell, layout)
    if torch != DATED:
        return _pinned(matrix, cell, torch, day)
    if "torch" in cell.pins:
        return cell
    if not matrix.torch:
        raise MatrixError(f"{OPTION} {DATED} needs the releases of torch; list them in [torch] of matrix.toml")
    if day is None:
        raise MatrixError(
            f"{cell.id} has no lock, whose date determines its torch; create it with: nox -s lock -- {cell.id}"
        )
    oldest, *later = matrix.torch
    return _pinned(matrix, cell, [oldest, *(release for release in later if matrix.torch[release] <= day)][-1], day)


def older_than_supported(matrix: Matrix, cell: Cell) -> bool:
    """Whether the cell is older than the oldest supported release of torch, which it gets nevertheless."""
    return cell.date is not None and bool(matrix.torch) and cell.date < next(iter(matrix.torch.values()))


def find(matrix: Matrix, layout: Layout, cell_id: str) -> Cell:
    """The cell of an id: from the matrix, or one of those with another torch, ``trl0.15.2-tf4.48.3-torch2.6.0``.

    Raises:
        MatrixError: when there is none.
    """
    known = {cell.id: cell for cell in matrix.cells}
    pin = _PIN.search(cell_id)
    base = known.get(_PIN.sub("", cell_id))
    if pin is None or base is None or cell_id in known:
        return matrix.cell(cell_id)
    return with_torch(matrix, layout, base, pin[1])


def cells_with_kept_locks(matrix: Matrix, layout: Layout) -> list[Cell]:
    """The cells whose locks belong in the repository: those of the matrix, and those of ``--torch dated``.

    Of the latter only those with a known date: a cell that was never locked has none. Those of
    ``--pairwise-strength 2`` alone are too many: they have a date, and are resolved when they run.
    """
    dated = [
        with_torch(matrix, layout, cell, DATED)
        for cell in (*matrix.default(), *matrix.tagged_dated())
        if matrix.torch and (cell.date or kept_date(cell, layout))
    ]
    with_locks = [cell for cell in matrix.cells if PAIRS_TAG not in cell.tags]
    return list({cell.id: cell for cell in (*with_locks, *dated)}.values())


def _pinned(matrix: Matrix, cell: Cell, torch: str, day: datetime.date | None) -> Cell:
    try:
        Version(torch)
    except InvalidVersion as error:
        raise MatrixError(f"{OPTION} {torch!r} is neither {DATED!r} nor a version such as 2.6.0") from error
    rest = {package: version for package, version in cell.pins.items() if package != "torch"}
    if matrix.pins.get("torch") == torch:
        return dataclasses.replace(cell, pins=rest)
    pins = parse_pins(f"{package}={version}" for package, version in {**rest, "torch": torch}.items())
    # As of the same day as before, so that nothing but torch and what it requires differs.
    return dataclasses.replace(cell, pins=pins, date=day)
