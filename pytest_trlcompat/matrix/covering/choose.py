"""Chooses cells from a listing in addition to those that a person wrote down, and says how much they cover."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pytest_trlcompat.matrix.cells import ADDED_TAGS, PAIRS_TAG, PAIRWISE_TAG, Cell, Matrix
from pytest_trlcompat.matrix.covering.array import Array, build
from pytest_trlcompat.matrix.covering.releases import PACKAGES, Listing, minor
from pytest_trlcompat.matrix.covering.space import Row, Space, pairs_in, transformers_that_train
from pytest_trlcompat.matrix.pairwise import pairwise_text

__all__ = ["Choice", "choose", "space_of", "written_down"]


@dataclass(frozen=True)
class Choice:
    """The cells that were chosen, and the space that they cover.

    Attributes:
        measured: the rows that have a cell of ``matrix.toml``.
    """

    space: Space
    array: Array
    measured: tuple[Row, ...]
    settle_days: int

    def notes(self) -> list[str]:
        """How much is covered, a line each."""
        array, possible = self.array, self.space.possible
        once = (*array.of_their_day, *array.each_release)
        before, after = pairs_in(self.measured) & possible, pairs_in([*self.measured, *once]) & possible
        releases = ", ".join(
            f"{len(versions)} of {name}" for name, versions in zip(PACKAGES, self.space.columns, strict=True)
        )
        return [
            f"Releases on {self.space.listing.day}: {releases}.",
            f"Pairs that may be installed together: {len(self.space.declared)}; of which an array may choose: "
            f"{len(possible)}.",
            f"The cells of matrix.toml have {len(before)} of these, {len(once)} more cells {len(after)}, "
            f"and another {len(array.each_pair)} all.",
            f"In no cell: {', '.join(array.left_out) or 'none'}.",
        ]

    def to_text(self) -> str:
        """What belongs into ``pairwise.toml``."""
        groups = {name: getattr(self.array, name) for name in ("of_their_day", "each_release", "each_pair")}
        return pairwise_text(
            PACKAGES, {name: [(self._date(row), row) for row in rows] for name, rows in groups.items()}, self.notes()
        )

    def _date(self, row: Row) -> datetime.date:
        """As of which a row is resolved: as any cell, some days after its newest pin came out."""
        newest = max(self.space.day(column, version) for column, version in enumerate(row))
        # Not after the registry was asked, as find_date() never names a day to come.
        return min(newest + datetime.timedelta(days=self.settle_days), self.space.listing.day)


def choose(matrix: Matrix, listing: Listing, locks: Iterable[Mapping[str, str]]) -> Choice:
    """Choose cells for what has none.

    Args:
        locks: package to version, of each cell that a person wrote down.
    """
    space = space_of(matrix, listing)
    measured = tuple(row for row in (_row(space, lock) for lock in locks) if row is not None)
    return Choice(space, build(space, measured), measured, matrix.settle_days)


def space_of(matrix: Matrix, listing: Listing) -> Space:
    """The releases of a listing, with what the matrix says about them."""
    return Space(listing, matrix.python, matrix.excluded, transformers_that_train(matrix.full()))


def written_down(matrix: Matrix) -> Sequence[Cell]:
    """The cells that a person wrote down, without those that are swept by the suites of vLLM alone."""
    return [cell for cell in matrix.cells if not {PAIRWISE_TAG, PAIRS_TAG, *ADDED_TAGS} & {*cell.tags}]


def _row(space: Space, lock: Mapping[str, str]) -> Row | None:
    """A lock as a row of the space: of other packages than TRL a release counts as the newest of its minor one."""
    row = []
    for column, package in enumerate(PACKAGES):
        text = lock.get(package, "")
        alike = (
            (text,) if package == "trl" else tuple(v for v in space.columns[column] if text and minor(v) == minor(text))
        )
        release = next((version for version in space.columns[column] if version in alike), None)
        if release is None:
            return None
        row.append(release)
    return tuple(row)
