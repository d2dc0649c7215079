"""Which releases may stand in one cell: by what they declare, by exclusions, and by what is known to train."""

from __future__ import annotations

import datetime
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from pytest_trlcompat.matrix.cells import Cell, Excluded
from pytest_trlcompat.matrix.covering.releases import PACKAGES, Listing, Release, allows, minor
from pytest_trlcompat.matrix.errors import MatrixError

__all__ = ["Pair", "Row", "Space", "pairs_in", "transformers_that_train"]

Row = tuple[str, ...]
"""A version of each of :data:`~pytest_trlcompat.matrix.covering.releases.PACKAGES`."""

Pair = tuple[int, str, int, str]
"""Two columns, each with a version."""


@dataclass(frozen=True)
class Space:
    """The releases of a listing, and which of them may stand in one cell.

    Attributes:
        excluded: combinations that are left out, each with its reason.
        train: for each minor release of TRL the lowest and the highest minor release of Transformers with which its
            trainers can be built. Beyond, every other suite is stopped, and a cell shows nothing but that.
    """

    listing: Listing
    python: str
    excluded: tuple[Excluded, ...] = ()
    train: Mapping[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]] | None = None

    @functools.cached_property
    def columns(self) -> tuple[tuple[str, ...], ...]:
        """The versions of each package, oldest first."""
        return tuple(tuple(release.version for release in self.listing.releases[package]) for package in PACKAGES)

    @functools.cached_property
    def _releases(self) -> dict[tuple[int, str], Release]:
        return {
            (column, release.version): release
            for column, package in enumerate(PACKAGES)
            for release in self.listing.releases[package]
        }

    def day(self, column: int, version: str) -> datetime.date:
        """When a release came out."""
        return self._releases[column, version].day

    @functools.cached_property
    def declared(self) -> frozenset[Pair]:
        """The pairs that may be installed together by what they declare."""
        return frozenset(pair for pair in self._every_pair() if self._is_declared(pair))

    @functools.cached_property
    def allowed(self) -> frozenset[Pair]:
        """Those of them that are not excluded, and with which TRL trains."""
        return frozenset(pair for pair in self.declared if not self._is_excluded(pair) and self._trains(pair))

    @functools.cached_property
    def possible(self) -> frozenset[Pair]:
        """Those of them that stand in some whole row: what an array can cover."""
        # What two packages allow each other, the rest may forbid in every whole row.
        return frozenset(pair for pair in self.allowed if self._completes({pair[0]: pair[1], pair[2]: pair[3]}, 0))

    def holds(self, row: Sequence[str]) -> bool:
        """Whether a whole row may be a cell."""
        return all(pair in self.allowed for pair in pairs_in([tuple(row)]))

    def _completes(self, row: dict[int, str], column: int) -> bool:
        if column == len(PACKAGES):
            return True
        choices = [row[column]] if column in row else self.columns[column]
        for version in choices:
            others = ((other, text) for other, text in row.items() if other != column)
            if all(_pair(column, version, *other) in self.allowed for other in others) and self._completes(
                {**row, column: version}, column + 1
            ):
                return True
        return False

    def _every_pair(self) -> Iterator[Pair]:
        for first, other in itertools.combinations(range(len(PACKAGES)), 2):
            for version, beside in itertools.product(self.columns[first], self.columns[other]):
                yield first, version, other, beside

    def _is_declared(self, pair: Pair) -> bool:
        release, other = self._releases[pair[0], pair[1]], self._releases[pair[2], pair[3]]
        return allows(release, other, self.python) and allows(other, release, self.python)

    def _is_excluded(self, pair: Pair) -> bool:
        versions = {PACKAGES[pair[0]]: pair[1], PACKAGES[pair[2]]: pair[3]}
        return any(
            all(
                name in versions and Version(versions[name]) in SpecifierSet(version_range)
                for name, version_range in exclusion.when.items()
            )
            for exclusion in self.excluded
        )

    def _trains(self, pair: Pair) -> bool:
        # Pairs have their columns in ascending order, so TRL, the first one, never stands second.
        if self.train is None or (PACKAGES[pair[0]], PACKAGES[pair[2]]) != ("trl", "transformers"):
            return True
        if minor(pair[1]) not in self.train:
            raise MatrixError(
                f"no cell of matrix.toml says with which Transformers trl {pair[1]} trains; "
                "add cells of this release to matrix.toml first"
            )
        lowest, highest = self.train[minor(pair[1])]
        return lowest <= minor(pair[3]) <= highest


def pairs_in(rows: Iterable[Row]) -> frozenset[Pair]:
    """Every pair of versions that stand in one row."""
    return frozenset(
        (first, row[first], other, row[other])
        for row in rows
        for first, other in itertools.combinations(range(len(row)), 2)
    )


def transformers_that_train(cells: Iterable[Cell]) -> dict[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]]:
    """For each minor release of TRL the lowest and highest one of Transformers among the cells of a full sweep."""
    transformers_of: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for cell in cells:
        transformers_of.setdefault(minor(cell.pins["trl"]), []).append(minor(cell.pins["transformers"]))
    return {trl: (min(versions), max(versions)) for trl, versions in transformers_of.items()}


def _pair(first: int, version: str, other: int, beside: str) -> Pair:
    return (first, version, other, beside) if first < other else (other, beside, first, version)
