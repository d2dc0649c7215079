"""How sure an answer is: whether cells were measured at the stack, around it, or only elsewhere; which come nearest.

Imports no package of the stack.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from packaging.version import Version

from pytest_trlcompat.catalog.evidence import Evidence, MeasuredCell
from pytest_trlcompat.catalog.known_issues import KnownIssue
from pytest_trlcompat.catalog.ranges import Range, at, parse
from pytest_trlcompat.catalog.regions import Region
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.doctor.given import ORDER, Given

__all__ = ["Level", "Sureness", "distance", "how_sure", "measured_here"]


class Level(str, Enum):
    """How sure an answer is."""

    MEASURED = "measured"
    """A cell with these versions was measured, and with this minor release of torch."""
    OTHER_TORCH = "other torch"
    """Such a cell was measured, but with another minor release of torch, of which the catalogue says the same."""
    BETWEEN = "between"
    """Two cells around it gave the same verdict."""
    BEYOND = "beyond"
    """Only cells on one side of it were measured, or others altogether."""
    UNMEASURED = "unmeasured"
    """The published sweep has no such verdict; the catalogue alone says so."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Sureness:
    """How sure a verdict is, and by which cells.

    Attributes:
        strategy: under which the cells were measured, where not under the one that was asked about.
        torch: with which they were measured, where not with the stack's.
    """

    level: Level
    cells: tuple[str, ...] = ()
    strategy: str = ""
    torch: str = ""

    def describe(self) -> str:
        under = f" under {self.strategy}" if self.strategy else ""
        match self.level:
            case Level.MEASURED:
                return f"measured{under} on {self.cells[0]}"
            case Level.OTHER_TORCH:
                return f"measured{under} on {self.cells[0]}, with torch {self.torch}"
            case Level.BETWEEN:
                return f"between {self.cells[0]} and {self.cells[1]}, which gave it{under}"
            case Level.BEYOND:
                return f"beyond what was measured; the nearest that gave it{under} is {self.cells[0]}"
            case _:
                return "not measured in the published sweep; the catalogue says so"


def how_sure(
    issue: KnownIssue,
    strategies: Sequence[str],
    verdict: Verdict,
    given: Given,
    evidence: Evidence,
    region: Region | None = None,
) -> Sureness:
    """How sure ``verdict`` is for the upstream trainer.

    Args:
        strategies: the one that is asked about, and others of which the catalogue says the same; their cells count
            where it has none.
        region: the versions for which it is said; cells elsewhere are no measure of it.
    """
    for label in strategies:
        cells = [cell for cell in evidence.cells if cell.gave((issue.id, "upstream", label), verdict)]
        if cells:
            inside = [cell for cell in cells if region is None or region.holds(cell.versions)]
            under = "" if label == strategies[0] else label
            if inside:
                return _of_cells(issue, given, inside, under)
            return Sureness(Level.BEYOND, (min(cells, key=distance(given)).id,), under)
    return Sureness(Level.UNMEASURED)


def _of_cells(issue: KnownIssue, given: Given, cells: Sequence[MeasuredCell], strategy: str) -> Sureness:
    nearest = sorted(cells, key=distance(given))
    here = measured_here(issue, given, nearest)
    if alike := [cell for cell in here if _has_torch_of(given, cell)]:
        return Sureness(Level.MEASURED, (alike[0].id,), strategy)
    if here:
        return Sureness(Level.OTHER_TORCH, (here[0].id,), strategy, here[0].versions["torch"])
    deciding = [package for package in ORDER if package in issue.packages and package not in given.unknown]
    pair = _around(deciding, given.pinned, nearest) if deciding and set(deciding) <= set(given.pinned) else None
    if pair:
        return Sureness(Level.BETWEEN, pair, strategy)
    return Sureness(Level.BEYOND, (nearest[0].id,), strategy)


def measured_here(issue: KnownIssue, given: Given, cells: Iterable[MeasuredCell]) -> list[MeasuredCell]:
    """Cells at the stack's versions of the packages that the issue's predictions look at, as far as they are given."""
    deciding = {package: given.versions[package] for package in issue.packages if package not in given.unknown}
    return [cell for cell in cells if all(_stands(cell, *each) for each in deciding.items())]


def _has_torch_of(given: Given, cell: MeasuredCell) -> bool:
    """Whether a cell was measured with the stack's minor release of torch, as far as both are known."""
    wanted, text = given.versions.get("torch"), cell.versions.get("torch")
    return wanted is None or text is None or _may_be(wanted, text)


@functools.cache
def _may_be(versions: Range, text: str) -> bool:
    """Whether one of ``versions`` is of the same minor release."""
    release = _public(text)
    return bool(versions & parse(f"=={release.major}.{release.minor}.*"))


def _stands(cell: MeasuredCell, package: str, versions: Range | None) -> bool:
    text = cell.versions.get(package)
    if text is None or versions is None:
        return text is None and versions is None
    return versions.covers(at(text))


def _around(
    packages: Sequence[str], versions: Mapping[str, Version], cells: Sequence[MeasuredCell]
) -> tuple[str, str] | None:
    """Two cells between which the stack lies in every package, the older first; of all pairs the nearest."""
    sides = []  # of each cell, whether it is older than the stack, the same or newer, in each package
    for cell in cells:
        theirs = [_version(cell, package) for package in packages]
        if None not in theirs:
            sides.append((cell, [_compare(one, versions[p]) for one, p in zip(theirs, packages, strict=True) if one]))
    for far, (cell, there) in enumerate(sides):
        for other, here in sides[:far]:
            if all(one * two <= 0 for one, two in zip(there, here, strict=True)):
                older_first = (cell, other) if there < here else (other, cell)
                return older_first[0].id, older_first[1].id
    return None


def _compare(one: Version, other: Version) -> int:
    return (one > other) - (one < other)


@functools.cache
def _public(text: str) -> Version:
    return Version(Version(text).public)


def _version(cell: MeasuredCell, package: str) -> Version | None:
    text = cell.versions.get(package)
    return None if text is None else _public(text)


def distance(given: Given) -> Callable[[MeasuredCell], tuple[object, ...]]:
    """How far cells are from a stack: first in trl, then in transformers, then in the others; newer before older."""
    pinned = given.pinned

    def key(cell: MeasuredCell) -> tuple[object, ...]:
        found: list[object] = []
        for package in ORDER:
            here, there = pinned.get(package), _version(cell, package)
            apart = 0 if here is None or there is None else _number(there) - _number(here)
            found += [abs(apart), apart < 0]
        return (*found, cell.id)

    return key


def _number(version: Version) -> int:
    return (version.major * 1000 + version.minor) * 1000 + version.micro
