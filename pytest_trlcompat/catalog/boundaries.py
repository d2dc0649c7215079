"""The catalogue's boundaries: versions across which a verdict changes, and whether cells were measured on either side.

A boundary that no cell has measured is a guess.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from packaging.version import Version

from pytest_trlcompat.catalog.evidence import Evidence, MeasuredCell
from pytest_trlcompat.catalog.issue import STRATEGIES, SUBJECTS, KnownIssue, Prediction
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.regions import Axis, Point, Region, Regions, regions
from pytest_trlcompat.catalog.verdict import Verdict

__all__ = ["Boundary", "Measured", "Side", "boundaries", "measure", "unmeasured"]

Releases = Mapping[str, Sequence[str]]
"""Package to all its releases, for those of which they are known."""

_Predicted = tuple[Verdict, str]
"""A verdict, and of ``blocked`` the known issue that stops the suite first: by another one, it is not as predicted."""


@dataclass(frozen=True)
class Boundary:
    """One version of one package across which a prediction changes.

    Attributes:
        strategies: under which it does, all in the same way.
        bound: the first range beyond it, ``>=0.18``.
        below: the verdict before it, ``above`` from it on.
        below_by: of a verdict ``blocked`` the known issue that stops the suite first, ``above_by`` likewise.
        elsewhere: where the other packages must stand for that; its axes leave ``package`` out.
        axis: the pieces of ``package``, of which ``piece`` is the last one below.
        reach: from which piece on it is ``below``, and to which one ``above``, for each point of ``elsewhere``.
    """

    issue: str
    subject: str
    strategies: tuple[str, ...]
    package: str
    bound: str
    below: Verdict
    above: Verdict
    elsewhere: Region
    axis: Axis
    piece: int
    reach: Mapping[Point, tuple[int, int]] = field(compare=False)
    below_by: str = ""
    above_by: str = ""

    def describe(self) -> str:
        other = self.elsewhere.describe()
        below, above = (
            f"{verdict} by {by}" if by else verdict.value
            for verdict, by in ((self.below, self.below_by), (self.above, self.above_by))
        )
        under = "every strategy" if set(self.strategies) >= set(STRATEGIES) else ", ".join(self.strategies)
        return f"{self.issue}, {self.subject}, {under}: {below} becomes {above} at {self.package} {self.bound}" + (
            f" with {other}" if other else ""
        )


@dataclass(frozen=True)
class Side:
    """The nearest measured release on one side of a boundary.

    Attributes:
        cells: that measured it and gave the verdict of this side.
    """

    version: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Measured:
    """A boundary, and how it was measured.

    Attributes:
        between: releases between the two sides that were not measured; ``None`` where they are not known.
    """

    boundary: Boundary
    below: Side | None
    above: Side | None
    between: tuple[str, ...] | None = None

    @property
    def both(self) -> bool:
        return self.below is not None and self.above is not None

    def describe(self) -> str:
        """One line: the boundary, and what is measured of it."""
        sides = [
            f"measured {name} on {', '.join(side.cells)}" if side else f"not measured {name}"
            for name, side in (("below", self.below), ("above", self.above))
        ]
        tight = ""
        if self.between is not None:
            tight = f"; {len(self.between)} releases between them" if self.between else "; no release between them"
        return f"{self.boundary.describe()}: {', '.join(sides)}{tight}"


def boundaries(issue: KnownIssue) -> list[Boundary]:
    """All boundaries between two predicted verdicts, by subject and package, from old to new."""
    together: dict[tuple[object, ...], tuple[Boundary, list[str]]] = {}
    for subject in SUBJECTS:
        # Most strategies of an issue have the same regions, of which one answer is kept.
        keyed: dict[int, list[tuple[tuple[object, ...], Boundary]]] = {}
        for strategy in issue.labels():
            strategy_regions = regions(issue, subject, strategy, {})
            # By identity: the projection of all stacks keeps its answers, so no other one gets this id.
            if id(strategy_regions) not in keyed:
                found_boundaries = _of_one(issue, subject, strategy, strategy_regions)
                keyed[id(strategy_regions)] = [(_key(boundary), boundary) for boundary in found_boundaries]
            for key, boundary in keyed[id(strategy_regions)]:
                together.setdefault(key, (boundary, []))[1].append(strategy)
    return [replace(boundary, strategies=tuple(strategies)) for boundary, strategies in together.values()]


def _key(boundary: Boundary) -> tuple[object, ...]:
    """All of a boundary but its strategies."""
    sides = (boundary.below, boundary.below_by, boundary.above, boundary.above_by)
    return boundary.subject, boundary.package, boundary.bound, sides, boundary.elsewhere


def measure(boundary: Boundary, evidence: Evidence, releases: Releases | None = None) -> Measured:
    """Which cells stand on either side of a boundary and gave the verdict of that side."""
    below, above = _sides(boundary, evidence)
    nearest_below = _nearest(boundary.package, below, newest=True)
    nearest_above = _nearest(boundary.package, above, newest=False)
    known = (releases or {}).get(boundary.package)
    between = None
    if known is not None and nearest_below and nearest_above:
        low, high = Version(nearest_below.version), Version(nearest_above.version)
        between = tuple(text for text in known if low < Version(text) < high and not Version(text).is_prerelease)
    return Measured(boundary, nearest_below, nearest_above, between)


def unmeasured(catalog: Catalog, evidence: Evidence) -> list[Measured]:
    """The boundaries of which a side, or both, were measured by no cell."""
    every = (measure(boundary, evidence) for issue in catalog.values() for boundary in boundaries(issue))
    return [measured for measured in every if not measured.both]


def _of_one(issue: KnownIssue, subject: str, strategy: str, regions: Regions) -> Iterator[Boundary]:
    """The boundaries of one subject under one strategy."""
    for position, axis in enumerate(regions.axes):
        others = (*regions.axes[:position], *regions.axes[position + 1 :])
        changes: dict[tuple[int, _Predicted, _Predicted], dict[Point, tuple[int, int]]] = {}
        for other in itertools.product(*(range(len(other_axis.pieces)) for other_axis in others)):
            # Along the versions of one package, while each of the others stays on one piece.
            along = [
                _predicted(regions.predicted[_insert(other, position, n)], subject) for n in range(len(axis.pieces))
            ]
            for piece, (below, above) in enumerate(itertools.pairwise(along)):
                if below is not None and above is not None and below[0] is not above[0]:
                    changes.setdefault((piece, below, above), {})[other] = _reach(along, piece)
        for (piece, before, after), reach in sorted(changes.items(), key=lambda change: change[0][0]):
            yield Boundary(
                issue=issue.id,
                subject=subject,
                strategies=(strategy,),
                package=axis.package,
                bound=axis.pieces[piece + 1].from_here(),
                below=before[0],
                above=after[0],
                elsewhere=Region(others, frozenset(reach)),
                axis=axis,
                piece=piece,
                reach=reach,
                below_by=before[1],
                above_by=after[1],
            )


def _reach(along: Sequence[_Predicted | None], piece: int) -> tuple[int, int]:
    """How far what is predicted below and above the end of a piece reaches."""
    first, last = piece, piece + 1
    while first > 0 and along[first - 1] == along[piece]:
        first -= 1
    while last < len(along) - 1 and along[last + 1] == along[piece + 1]:
        last += 1
    return first, last


def _predicted(prediction: Prediction | None, subject: str) -> _Predicted | None:
    """As :meth:`KnownIssue.predict` has it: without a prediction, the corrected trainer is right."""
    if prediction is not None:
        return prediction.verdict, prediction.by
    return (Verdict.OK, "") if subject == "corrected" else None


def _insert(point: Point, position: int, piece: int) -> Point:
    return (*point[:position], piece, *point[position:])


def _sides(boundary: Boundary, evidence: Evidence) -> tuple[list[MeasuredCell], list[MeasuredCell]]:
    """Cells below and above that gave the verdict of their side, the other packages being where they must."""
    below, above = [], []
    for cell in evidence.cells:
        keys = [(boundary.issue, boundary.subject, strategy) for strategy in boundary.strategies]
        piece = boundary.axis.piece(cell.versions.get(boundary.package))
        others = [axis.piece(cell.versions.get(axis.package)) for axis in boundary.elsewhere.axes]
        first, last = boundary.reach.get(tuple(n for n in others if n is not None), (0, -1))
        if piece is None or not first <= piece <= last:
            continue
        if piece <= boundary.piece and any(cell.gave(key, boundary.below, boundary.below_by) for key in keys):
            below.append(cell)
        elif piece > boundary.piece and any(cell.gave(key, boundary.above, boundary.above_by) for key in keys):
            above.append(cell)
    return below, above


def _nearest(package: str, cells: Sequence[MeasuredCell], *, newest: bool) -> Side | None:
    if not cells:
        return None
    # All builds of a release count as that release.
    versions = {cell.id: Version(Version(cell.versions[package]).public) for cell in cells}
    version = max(versions.values()) if newest else min(versions.values())
    return Side(str(version), tuple(name for name, theirs in versions.items() if theirs == version))
