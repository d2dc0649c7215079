"""What the catalogue predicts for all versions at once, not for one stack: the regions of each prediction.

Needed where a part of a stack is not known, to find the boundaries across which a verdict changes, and to see that
every prediction can be reached.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_trlcompat.catalog.issue import KnownIssue, Prediction
from pytest_trlcompat.catalog.ranges import ALL, Range, at, either, parse, pieces
from pytest_trlcompat.stack import PACKAGES

__all__ = ["Axis", "Domain", "Point", "Projection", "Region", "Regions", "regions", "unreachable"]

Domain = Mapping[str, Range | None]
"""Where each package may stand; ``None``: it is not installed; a package that is not named may stand anywhere."""

Point = tuple[int, ...]
"""A piece of each axis, by its number."""


@dataclass(frozen=True)
class Axis:
    """A package whose version matters and is not settled, cut where some prediction's range begins or ends."""

    package: str
    domain: Range
    pieces: tuple[Range, ...]

    def piece(self, text: str | None) -> int | None:
        """On which piece a version stands; ``None``: on none, or it is not installed."""
        if text is None:
            return None
        if text not in self._numbers:
            here = at(text)
            self._numbers[text] = next((number for number, piece in enumerate(self.pieces) if piece.covers(here)), None)
        return self._numbers[text]

    @functools.cached_property
    def _numbers(self) -> dict[str, int | None]:
        """The pieces of versions that were asked for: each cell's, for each boundary."""
        return {}

    def describe(self, chosen: Iterable[int]) -> str:
        union = either(self.pieces[number] for number in chosen)
        return f"{self.package} {union.describe(self.domain)}"


@dataclass(frozen=True)
class Region:
    """Some of the points that the axes span.

    Attributes:
        impossible: points at which no stack stands, see :class:`Projection`.
    """

    axes: tuple[Axis, ...]
    points: frozenset[Point]
    impossible: frozenset[Point] = frozenset()

    @property
    def whole(self) -> bool:
        """Whether it holds every point that is possible."""
        return len(self.points) + len(self.impossible) == math.prod(len(axis.pieces) for axis in self.axes)

    def holds(self, versions: Mapping[str, str]) -> bool:
        """Whether a stack stands in it."""
        return tuple(axis.piece(versions.get(axis.package)) for axis in self.axes) in self.points

    def describe(self) -> str:
        """``trl <0.18 and accelerate >=1.6, or trl >=0.29``; empty for the whole."""
        return self._text

    @functools.cached_property
    def _text(self) -> str:
        return ", or ".join(" and ".join(part) for part in _boxes(self.axes, self.points) if part)


def _boxes(axes: Sequence[Axis], points: Iterable[Point]) -> list[list[str]]:
    """Boxes that cover the points, each as the texts of its ranges; an axis that a box holds whole has no text."""
    if not axes:
        return [[]]
    first, rest = axes[0], axes[1:]
    beside: dict[int, set[Point]] = {}
    for point in points:
        beside.setdefault(point[0], set()).add(point[1:])
    alike: dict[frozenset[Point], list[int]] = {}
    for number in sorted(beside):
        alike.setdefault(frozenset(beside[number]), []).append(number)
    boxes = []
    for others, numbers in alike.items():
        text = [] if len(numbers) == len(first.pieces) else [first.describe(numbers)]
        boxes += [[*text, *box] for box in _boxes(rest, others)]
    return boxes


@dataclass(frozen=True)
class Regions:
    """What is predicted of one subject under one strategy, all over a domain.

    Attributes:
        axes: packages whose versions still decide; none where the domain settles the answer.
        predicted: the first prediction that applies at each possible point, ``None`` where none does.
        impossible: the other points, see :class:`Projection`.
    """

    axes: tuple[Axis, ...]
    predicted: Mapping[Point, Prediction | None]
    impossible: frozenset[Point] = frozenset()

    def by_prediction(self) -> list[tuple[Prediction | None, Region]]:
        return self._by_prediction

    @functools.cached_property
    def _by_prediction(self) -> list[tuple[Prediction | None, Region]]:
        points: dict[int, set[Point]] = {}
        predictions: dict[int, Prediction | None] = {}
        for point, prediction in self.predicted.items():
            # By id, since a prediction holds a mapping and cannot be hashed.
            points.setdefault(id(prediction), set()).add(point)
            predictions[id(prediction)] = prediction
        return [(predictions[key], Region(self.axes, frozenset(points[key]), self.impossible)) for key in points]


class Projection:
    """The catalogue on one stack, or on all that a domain holds.

    Each prediction is compared with the domain once, and questions that the same predictions decide share their answer:
    most strategies of an issue, and many issues, ask the same question.
    """

    def __init__(self, domain: Domain, together: Sequence[Mapping[str, Range]] = ()) -> None:
        """
        Args:
            together: what stands together in ``domain``, as the forks of a lock do: a point is possible if one of these
                meets it in every package; without any, all points are.
        """
        self.domain = domain
        self._together = together
        self._held: dict[tuple[str, str], bool | None] = {}
        # With the prediction, so that no other one gets its id.
        self._left: dict[int, tuple[Prediction, dict[str, Range] | None]] = {}
        self._regions: dict[tuple[int, ...], Regions] = {}

    def regions(self, predictions: Iterable[Prediction], subject: str, strategy: str) -> Regions:
        """Where in the domain each of an issue's predictions applies."""
        return self._of_alive(self._relevant(predictions), subject, strategy)

    def _of_alive(
        self, relevant: Iterable[tuple[Prediction, dict[str, Range]]], subject: str, strategy: str
    ) -> Regions:
        alive = list(_until_settled(relevant, subject, strategy))
        key = tuple(id(prediction) for prediction, _ in alive)
        regions = self._regions.get(key)
        if regions is None:
            regions = self._regions[key] = self._cut(alive)
        return regions

    def problems(
        self, issue: KnownIssue, predictions: Sequence[Prediction], considered: Sequence[str]
    ) -> list[tuple[str, Prediction, Region]]:
        """The strategies under which a problem is predicted for TRL's trainer, with the prediction and its versions.

        Args:
            predictions: of the issue, all or some.
        """
        relevant = list(self._relevant(predictions))
        problems = []
        if relevant and issue.can_show(self.domain):
            for label in issue.labels_among(considered):
                for prediction, region in self._of_alive(relevant, "upstream", label).by_prediction():
                    if prediction is not None and prediction.verdict.is_problem:
                        problems.append((label, prediction, region))
        return problems

    def left(self, prediction: Prediction) -> dict[str, Range] | None:
        """Those of a prediction's ranges that the domain does not settle; ``None`` where it applies nowhere in it."""
        remembered = self._left.get(id(prediction))
        if remembered is None:
            remembered = self._left[id(prediction)] = prediction, self._unsettled(prediction)
        return remembered[1]

    def _unsettled(self, prediction: Prediction) -> dict[str, Range] | None:
        left: dict[str, Range] = {}
        for package, text in prediction.when.items():
            key = package, text
            if key not in self._held:
                self._held[key] = self._holds(package, text)
            if self._held[key] is False:
                return None
            if self._held[key] is None:
                left[package] = parse(text)
        return left

    def _holds(self, package: str, text: str) -> bool | None:
        """Whether a range holds all over the domain; ``None``: only for some versions."""
        possible, versions = self.domain.get(package, ALL), parse(text)
        if possible is None or not versions.meets(possible):
            return False
        return True if versions.covers(possible) else None

    def _relevant(self, predictions: Iterable[Prediction]) -> Iterator[tuple[Prediction, dict[str, Range]]]:
        """The predictions that apply somewhere in the domain, with those of their ranges that it does not settle.

        Most predictions apply to other versions: to ask this first, once for all labels, costs less.
        """
        for prediction in predictions:
            if (left := self.left(prediction)) is not None:
                yield prediction, left

    def _cut(self, alive: Sequence[tuple[Prediction, dict[str, Range]]]) -> Regions:
        axes = tuple(
            _axis(package, alive, self.domain) for package in PACKAGES if any(package in left for _, left in alive)
        )
        if not axes:
            return Regions((), {(): alive[0][0] if alive else None})
        holds = [
            (
                prediction,
                [
                    {n for n, piece in enumerate(axis.pieces) if left[axis.package].covers(piece)}
                    if axis.package in left
                    else None
                    for axis in axes
                ],
            )
            for prediction, left in alive
        ]
        every = set(itertools.product(*(range(len(axis.pieces)) for axis in axes)))
        possible = set(_possible(axes, self._together)) if self._together and len(axes) > 1 else every
        predicted = {
            point: next(
                (
                    prediction
                    for prediction, sets in holds
                    if all(allowed is None or n in allowed for n, allowed in zip(point, sets, strict=True))
                ),
                None,
            )
            for point in sorted(possible)
        }
        return Regions(axes, predicted, frozenset(every - possible))


def _until_settled(
    relevant: Iterable[tuple[Prediction, dict[str, Range]]], subject: str, strategy: str
) -> Iterator[tuple[Prediction, dict[str, Range]]]:
    """The predictions for a subject under a strategy up to one that applies to all versions: no later one counts."""
    for prediction, left in relevant:
        if prediction.concerns(subject, strategy):
            yield prediction, left
            if not left:
                return


@functools.cache
def everywhere() -> Projection:
    """The catalogue on all stacks: what a page of an issue asks, the boundaries ask again."""
    return Projection({})


def regions(
    issue: KnownIssue, subject: str, strategy: str, domain: Domain, together: Sequence[Mapping[str, Range]] = ()
) -> Regions:
    """:meth:`Projection.regions` of one issue in a domain about which nothing else is asked."""
    projection = Projection(domain, together) if domain or together else everywhere()
    return projection.regions(issue.predictions, subject, strategy)


def _possible(axes: Sequence[Axis], together: Iterable[Mapping[str, Range]]) -> Iterator[Point]:
    for stack in together:
        meeting = (
            [number for number, piece in enumerate(axis.pieces) if piece.meets(stack.get(axis.package, axis.domain))]
            for axis in axes
        )
        yield from itertools.product(*meeting)


def _axis(package: str, alive: Sequence[tuple[Prediction, dict[str, Range]]], domain: Domain) -> Axis:
    possible = domain.get(package, ALL)
    assert possible is not None  # else no prediction that needs it is alive
    return Axis(package, possible, tuple(pieces(possible, [left[package] for _, left in alive if package in left])))


def unreachable(issue: KnownIssue) -> list[Prediction]:
    """Predictions that never decide, because earlier ones apply wherever they would."""
    reached = {
        id(prediction)
        for subject in {prediction.subject for prediction in issue.predictions}
        for strategy in (*issue.labels(), *_examples(issue))
        for prediction in everywhere().regions(issue.predictions, subject, strategy).predicted.values()
    }
    return [prediction for prediction in issue.predictions if id(prediction) not in reached]


def _examples(issue: KnownIssue) -> list[str]:
    """Variants that the patterns of an entry without a list of strategies mean: ``zero3-any`` for ``zero3-*``."""
    if issue.strategies:
        return []
    patterns = {pattern for prediction in issue.predictions for pattern in prediction.strategies}
    return [pattern.replace("*", "any").replace("?", "x") for pattern in patterns]
