"""A stack among the measured cells: which of them have its versions, which are older or newer, and which is nearest."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

from packaging.version import Version

from pytest_trlcompat.catalog.measurements import CellSet, Measurements
from pytest_trlcompat.catalog.ranges import minor_release
from pytest_trlcompat.doctor.stack_spec import ORDER, StackSpec
from pytest_trlcompat.stack import OPTIONAL

__all__ = ["Neighbours"]


class Neighbours:
    """The measured cells as a stack sees them. Each question is answered once: many known issues ask the same.

    Attributes:
        spec: the stack.
        measured: what the cells gave.
        pinned: the packages of which the stack's version is known.
        order: the numbers of all cells, the nearest first: by trl, then transformers, then the others; newer before
            older.
    """

    def __init__(self, spec: StackSpec, measured: Measurements) -> None:
        self.spec, self.measured = spec, measured
        self.pinned = spec.pinned
        self._unknown = frozenset(spec.unknown)
        self._at: dict[str, CellSet] = {}
        self._sides: dict[str, tuple[CellSet, CellSet]] = {}
        self.order: Sequence[int] = sorted(range(len(measured.cells)), key=self._distances().__getitem__)

    def _distances(self) -> list[tuple[object, ...]]:
        """How far each cell is from the stack."""
        tables = []
        for package in ORDER:
            if (here := self.pinned.get(package)) is not None:
                apart = {text: _number(_public(text)) - _number(here) for text in self.measured.having(package) if text}
                # Of two that are equally far the newer one comes first.
                tables.append((package, {text: (abs(number), number < 0) for text, number in apart.items()}))
        return [
            (*(table.get(cell.versions.get(package, ""), (0, False)) for package, table in tables), cell.id)
            for cell in self.measured.cells
        ]

    def nearest_first(self, cells: CellSet) -> Iterator[int]:
        """The numbers of the cells in a set."""
        return (number for number in self.order if cells >> number & 1)

    def nearest(self, cells: CellSet) -> int:
        """The number of the nearest cell in a set that is not empty."""
        return next(self.nearest_first(cells))

    def at(self, package: str) -> CellSet:
        """The cells that have the stack's version of a package; where it is not installed, those without it."""
        if package not in self._at:
            versions = self.spec.versions.get(package)
            sets = self.measured.having(package)
            self._at[package] = (
                sets.get("", 0)
                if versions is None
                else self.measured.where(package, lambda here: versions.covers(here))
            )
        return self._at[package]

    def here(self, packages: Iterable[str]) -> CellSet:
        """The cells that have the stack's versions of some packages, where known."""
        cells = self.measured.every
        for package in packages:
            if package not in self._unknown:
                cells &= self.at(package)
        return cells

    def is_known(self, package: str) -> bool:
        """Whether something is known about the stack's version of a package."""
        return package not in self._unknown

    @functools.cached_property
    def with_same_torch(self) -> CellSet:
        """The cells with the stack's minor release of torch, or where either is unknown."""
        versions = self.spec.versions.get("torch")
        if versions is None:
            return self.measured.every
        sets = self.measured.having("torch").items()
        return sum(cells for text, cells in sets if not text or versions.meets(minor_release(_public(text))))

    @functools.cached_property
    def with_same_packages(self) -> CellSet:
        """The cells that have no optional package that this stack does not have."""
        cells = self.measured.every
        for package in OPTIONAL:
            if self.spec.versions.get(package) is None:
                cells &= self.measured.having(package).get("", 0)
        return cells

    def around(self, packages: Sequence[str], cells: CellSet) -> tuple[int, int] | None:
        """The nearest two cells of a set between which the stack lies in every package, the older first.

        Args:
            packages: of which the stack's versions are known.
        """
        sides = [self._older_and_newer(package) for package in packages]
        for package in packages:
            cells &= ~self.measured.having(package).get("", 0)
        nearer = 0
        for far in self.nearest_first(cells):
            beyond = nearer
            for older, newer in sides:
                # Where the far cell has the stack's own version, any other will do: -1 has every bit.
                beyond &= ~older if older >> far & 1 else ~newer if newer >> far & 1 else -1
            if beyond:
                near = self.nearest(beyond)
                there, here = ([_side(number, *side) for side in sides] for number in (far, near))
                return (far, near) if there < here else (near, far)
            nearer |= 1 << far
        return None

    def _older_and_newer(self, package: str) -> tuple[CellSet, CellSet]:
        """The cells whose version of a package is older than the stack's, and those whose version is newer."""
        if package not in self._sides:
            here, older, newer = self.pinned[package], 0, 0
            for text, cells in self.measured.having(package).items():
                if text:
                    older |= cells if _public(text) < here else 0
                    newer |= cells if _public(text) > here else 0
            self._sides[package] = older, newer
        return self._sides[package]


def _side(number: int, older: CellSet, newer: CellSet) -> int:
    return (newer >> number & 1) - (older >> number & 1)


@functools.cache
def _public(text: str) -> Version:
    return Version(Version(text).public)


def _number(version: Version) -> int:
    return (version.major * 1000 + version.minor) * 1000 + version.micro
