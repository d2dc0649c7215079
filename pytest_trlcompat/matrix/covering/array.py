"""Covering arrays over releases, made by ``covertable``.

Of two libraries it is the one that covers every pair under constraints. Of the 4,245 possible pairs of 2026-11-23,
``allpairspy`` 2.5 left 1,392 out, since it ends at the first row that adds no pair; ``covertable`` 3.2 left none.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from covertable import make

from pytest_trlcompat.matrix.covering.releases import PACKAGES
from pytest_trlcompat.matrix.covering.space import Row, Space

__all__ = ["Array", "build"]

_SEED = "pairwise"
"""Orders what is equally good; the same seed gives the same array."""


@dataclass(frozen=True)
class Array:
    """The rows, each group with what the ones before leave.

    Attributes:
        of_their_day: each release of TRL that has no cell, with what was newest on its day.
        each_release: of the rows that have every other pair, as few as have every other release that has no cell.
        each_pair: the rest of these rows.
        left_out: releases that can stand in no cell at all.
    """

    of_their_day: tuple[Row, ...]
    each_release: tuple[Row, ...]
    each_pair: tuple[Row, ...]
    left_out: tuple[str, ...]


def build(space: Space, measured: Sequence[Row]) -> Array:
    """The arrays over a space.

    Args:
        measured: rows that have a cell; those that the space does not hold are not counted.
    """
    rows = [row for row in dict.fromkeys(measured) if space.holds(row)]
    have = {row[0] for row in rows}
    rows_of_their_day = (_of_its_day(space, version) for version in space.columns[0] if version not in have)
    days = [row for row in rows_of_their_day if row is not None]
    pairs = _every_pair(space, [*rows, *days])
    once = _every_release(pairs, [*rows, *days])
    # A pair is flat: its columns stand at 0 and 2, and the version of each after it.
    usable = {(pair[side], pair[side + 1]) for pair in space.possible for side in (0, 2)}
    left_out = tuple(
        f"{PACKAGES[column]} {version}"
        for column, versions in enumerate(space.columns)
        for version in versions
        if (column, version) not in usable
    )
    return Array(tuple(days), once, tuple(row for row in pairs if row not in once), left_out)


def _of_its_day(space: Space, version: str) -> Row | None:
    """A release of TRL with the newest of each other package that was there, or else the first that came."""
    day = space.day(0, version)
    orders = [[version]]
    for column, versions in enumerate(space.columns[1:], 1):
        there = [release for release in reversed(versions) if space.day(column, release) <= day]
        orders.append([*there, *(release for release in versions if release not in there)])
    return next(filter(space.holds, itertools.product(*orders)), None)


def _every_release(rows: Sequence[Row], before: Sequence[Row]) -> tuple[Row, ...]:
    """Some of the rows, so that each release of them that is not in the rows before has one: most new ones first."""
    missing = {release for row in rows for release in enumerate(row)} - {
        release for row in before for release in enumerate(row)
    }
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(missing.intersection(enumerate(row))))  # the first of the best
        missing.difference_update(enumerate(best))
        chosen.append(best)
    return tuple(chosen)


def _every_pair(space: Space, rows: Sequence[Row]) -> list[Row]:
    """The rows that must be added so that every pair that is possible has one."""
    constraints = [
        {
            "operator": "fn",
            "requires": [PACKAGES[first], PACKAGES[other]],
            # The defaults bind this pair: without them every function would see the last pair of the loop.
            "evaluate": lambda row, first=first, other=other: (
                (first, row[PACKAGES[first]], other, row[PACKAGES[other]]) in space.allowed
            ),
        }
        for first, other in itertools.combinations(range(len(PACKAGES)), 2)
    ]
    array = make(
        dict(zip(PACKAGES, map(list, space.columns), strict=True)),
        strength=2,
        salt=_SEED,
        constraints=constraints,
        # Rows that have a cell count as part of the array, so that only pairs without one are added.
        presets=[dict(zip(PACKAGES, row, strict=True)) for row in rows],
    )
    array_rows = dict.fromkeys(tuple(str(row[package]) for package in PACKAGES) for row in array)
    return [row for row in array_rows if row not in set(rows)]
