"""How well measurements support an answer: by cells with the stack's versions, on both sides of them, or elsewhere.

Imports no package of the stack.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from packaging.version import Version

from pytest_trlcompat.catalog.evidence import Evidence, MeasuredCell
from pytest_trlcompat.catalog.issue import KnownIssue, Prediction
from pytest_trlcompat.catalog.ranges import Range, at, parse
from pytest_trlcompat.catalog.regions import Region
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.doctor.stack_spec import ORDER, StackSpec

__all__ = ["Confidence", "Level", "confidence_in", "distance", "measured_here"]


class Level(str, Enum):
    """How well measurements support an answer, from best to worst."""

    MEASURED = "measured"
    """A cell with these versions and this minor release of torch was measured."""
    OTHER_TORCH = "other torch"
    """Such a cell was measured, with another minor release of torch, for which the catalogue predicts the same."""
    BETWEEN = "between"
    """Two cells, one with older and one with newer versions, gave the same verdict."""
    BEYOND = "beyond"
    """Only cells on one side of the stack's versions gave this verdict, or cells to which it does not apply."""
    UNMEASURED = "unmeasured"
    """No cell of the published sweep gave this verdict; only the catalogue predicts it."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Confidence:
    """How well measurements support a verdict, and which cells do.

    Attributes:
        strategy: under which the cells were measured, if not under the requested one.
        torch: with which they were measured, if not with the stack's.
        cause_predicted: whether they are known to have failed, but not why: the published sweep did not attribute their
            failures to known issues, so that the cause of a ``blocked`` verdict is predicted alone.
    """

    level: Level
    cells: tuple[str, ...] = ()
    strategy: str = ""
    torch: str = ""
    cause_predicted: bool = False

    def describe(self) -> str:
        if self.cause_predicted:
            return f"{self._failures()}; the cause is predicted"
        under = f" under {self.strategy}" if self.strategy else ""
        torch = f", with torch {self.torch}" if self.torch else ""
        match self.level:
            case Level.MEASURED:
                return f"measured on {self.cells[0]}{under}"
            case Level.OTHER_TORCH:
                return f"measured on {self.cells[0]}{under}{torch}"
            case Level.BETWEEN:
                return f"between {self.cells[0]} and {self.cells[1]}, which both gave this verdict{under}{torch}"
            case Level.BEYOND:
                nearest = f"the nearest cell with this verdict{under} is {self.cells[0]}"
                return f"outside the measured range; {nearest}{torch}"
            case _:
                return "not measured in the published sweep; predicted by the catalogue"

    def _failures(self) -> str:
        under = f" under {self.strategy}" if self.strategy else ""
        match self.level:
            case Level.BEYOND:
                return f"outside the measured range; the nearest cell that failed{under} is {self.cells[0]}"
            case Level.BETWEEN:
                return f"failed on {self.cells[0]} and {self.cells[1]}{under}, between which this stack is"
            case _:
                torch = f", with torch {self.torch}" if self.torch else ""
                return f"failed on {self.cells[0]}{under}{torch}"


def confidence_in(
    issue: KnownIssue,
    strategies: Sequence[str],
    verdict: Verdict,
    spec: StackSpec,
    evidence: Evidence,
    region: Region | None = None,
    by: str = "",
    prediction: Prediction | None = None,
) -> Confidence:
    """How well measurements support ``verdict`` for the upstream trainer.

    Args:
        evidence: its cells the nearest to the stack first.
        strategies: the requested one, then others for which the catalogue predicts the same; the cells of the first
            that has any are used.
        region: the versions for which the verdict is predicted; a cell outside them does not support it.
        by: of ``blocked`` the known issue that is predicted to stop the test; another one does not support it.
        prediction: that gives the verdict; a cell for which another one does has it for another reason.
    """
    for label in strategies:
        cells = [cell for cell in evidence.cells if cell.gave((issue.id, "upstream", label), verdict, by)]
        if cells:
            inside = [
                cell
                for cell in cells
                if (region is None or region.holds(cell.versions))
                and (prediction is None or issue.predict("upstream", label, cell.versions) is prediction)
            ]
            under = "" if label == strategies[0] else label
            beyond = Confidence(Level.BEYOND, (cells[0].id,), under, _torch_of(issue, spec, cells[:1]))
            found = _of_cells(issue, spec, inside, under) if inside else beyond
            guessed = verdict is Verdict.BLOCKED and any(c.id in found.cells and not c.attributed for c in cells)
            return dataclasses.replace(found, cause_predicted=True) if guessed else found
    return Confidence(Level.UNMEASURED)


def _of_cells(issue: KnownIssue, spec: StackSpec, cells: Sequence[MeasuredCell], strategy: str) -> Confidence:
    here = measured_here(issue, spec, cells)
    if alike := [cell for cell in here if _has_same_torch(spec, cell)]:
        return Confidence(Level.MEASURED, (alike[0].id,), strategy)
    if here:
        return Confidence(Level.OTHER_TORCH, (here[0].id,), strategy, here[0].versions["torch"])
    deciding = [package for package in ORDER if package in issue.packages and package not in spec.unknown]
    pair = _pair_around(deciding, spec.pinned, cells) if deciding and set(deciding) <= set(spec.pinned) else None
    if pair:
        torch = _torch_of(issue, spec, [cell for cell in cells if cell.id in pair])
        return Confidence(Level.BETWEEN, pair, strategy, torch)
    return Confidence(Level.BEYOND, (cells[0].id,), strategy, _torch_of(issue, spec, cells[:1]))


def _torch_of(issue: KnownIssue, spec: StackSpec, cells: Sequence[MeasuredCell]) -> str:
    """The torch with which some cells were measured, where none has the stack's and no prediction looks at it."""
    if "torch" in issue.packages or any(_has_same_torch(spec, cell) for cell in cells):
        return ""
    return cells[0].versions["torch"]


def measured_here(issue: KnownIssue, spec: StackSpec, cells: Iterable[MeasuredCell]) -> list[MeasuredCell]:
    """Cells that have the stack's versions of the packages on which the issue's predictions depend, where known."""
    deciding = {package: spec.versions[package] for package in issue.packages if package not in spec.unknown}
    return [cell for cell in cells if all(_has_version(cell, *each) for each in deciding.items())]


def _has_same_torch(spec: StackSpec, cell: MeasuredCell) -> bool:
    """Whether a cell was measured with the stack's minor release of torch; true if either is unknown."""
    wanted, text = spec.versions.get("torch"), cell.versions.get("torch")
    return wanted is None or text is None or _may_be_minor_release(wanted, text)


def _may_be_minor_release(versions: Range, text: str) -> bool:
    """Whether ``versions`` contains one of the minor release of ``text``."""
    release = _public(text)
    return versions.meets(parse(f"=={release.major}.{release.minor}.*"))


def _has_version(cell: MeasuredCell, package: str, versions: Range | None) -> bool:
    text = cell.versions.get(package)
    if text is None or versions is None:
        return text is None and versions is None
    return versions.covers(at(text))


def _pair_around(
    packages: Sequence[str], versions: Mapping[str, Version], cells: Sequence[MeasuredCell]
) -> tuple[str, str] | None:
    """The nearest two cells between which the stack lies in every package, the older first."""
    sides = []  # for each cell: older than the stack, the same or newer, in each package
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


def distance(spec: StackSpec) -> Callable[[MeasuredCell], tuple[object, ...]]:
    """A sort key, the nearest cell to a stack first: by trl, then transformers, then the others; newer before older."""
    pinned = spec.pinned

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
