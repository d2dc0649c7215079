"""The releases with which upstream is right, derived from a known issue's predictions: where its cure is not needed.

A point of the space of versions is a *problem* if the issue itself is predicted to show there, and *right* if ``ok`` is
predicted. Where another known issue stops the suite first, or where nothing is predicted, this issue says nothing: such
points neither forbid an alternative nor make one. The same holds for points without the trainer or the strategy. A
problem also counts where another known issue causes it: nobody is sent to releases where it shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.catalog.issue import KnownIssue, Prediction
from pytest_trlcompat.catalog.ranges import Range, at, parse, restored
from pytest_trlcompat.catalog.regions import Axis, Domain, Point, Projection
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.stack import PACKAGES

if TYPE_CHECKING:
    from pytest_trlcompat.catalog.evidence import MeasuredCell

__all__ = ["Alternative", "FixedReleases", "counted", "fixed_releases"]

_OLDEST = {"trl": ">=0.9.6"}
"""Releases that have a trainer of those that the suites run: no older one is ever advised."""
_FIRST = ("trl", "transformers")
"""Packages that people look at first."""

Box = tuple[frozenset[int], ...]
"""Of each axis the pieces in it."""
Judge = Callable[[Prediction], bool]


@dataclass(frozen=True)
class Alternative:
    """Releases of some packages that, taken together, are right whatever the releases of all other packages.

    Attributes:
        lasting: whether it holds for all later releases of these packages too, as far as they have the trainer.
        surplus: by strategy, in how many more of the measured cells that have these releases the issue's suite failed
            for another reason than was right; empty where nobody has counted, see :func:`counted`.
    """

    ranges: Mapping[str, Range]
    lasting: bool
    surplus: Mapping[str, int] = field(default_factory=dict)

    def describe(self) -> str:
        """``trl >=0.15 with transformers >=4.49``."""
        return " with ".join(f"{package} {versions.describe()}" for package, versions in self.ranges.items())

    def holds(self, versions: Domain) -> bool:
        """Whether a stack has it, whatever the versions of its packages that are not settled."""
        settled = {package: versions.get(package) for package in self.ranges}
        return all(here is not None and self.ranges[package].covers(here) for package, here in settled.items())

    def first(self) -> str:
        """From which releases on it lasts: ``trl 0.15 with transformers 4.49``."""
        starts = ((package, Range(versions.intervals[-1:]).from_here()) for package, versions in self.ranges.items())
        return " with ".join(f"{package} {text.lstrip('>=')}" for package, text in starts)


@dataclass(frozen=True)
class FixedReleases:
    """What is right under some strategies.

    Attributes:
        alternatives: each is enough; empty where no release is right.
    """

    strategies: tuple[str, ...]
    alternatives: tuple[Alternative, ...]

    def stored(self) -> list[Any]:
        """As JSON holds it; see :meth:`restored`."""
        alternatives = [
            [
                {package: versions.stored() for package, versions in alternative.ranges.items()},
                alternative.lasting,
                alternative.surplus,
            ]
            for alternative in self.alternatives
        ]
        return [self.strategies, alternatives]

    @classmethod
    def restored(cls, data: Sequence[Any]) -> FixedReleases:
        """The inverse of :meth:`stored`."""
        strategies, alternatives = data
        return cls(
            tuple(strategies),
            tuple(
                Alternative({package: restored(text) for package, text in ranges.items()}, lasting, surplus)
                for ranges, lasting, surplus in alternatives
            ),
        )


def counted(issue: KnownIssue, cells: Sequence[MeasuredCell]) -> tuple[FixedReleases, ...]:
    """:func:`fixed_releases`, with what cells have measured with them."""
    return tuple(
        replace(
            answer,
            alternatives=tuple(
                _counted(issue, answer.strategies, alternative, cells) for alternative in answer.alternatives
            ),
        )
        for answer in fixed_releases(issue)
    )


def _counted(
    issue: KnownIssue, strategies: Sequence[str], alternative: Alternative, cells: Sequence[MeasuredCell]
) -> Alternative:
    surplus: dict[str, int] = {}
    for cell in cells:
        for label in strategies:
            verdict = cell.verdicts.get((issue.id, "upstream", label))
            here = (verdict in (Verdict.ERROR, Verdict.BLOCKED)) - (verdict is Verdict.OK)
            if here and alternative.holds({p: at(cell.versions[p]) for p in alternative.ranges if p in cell.versions}):
                surplus[label] = surplus.get(label, 0) + here
    return replace(alternative, surplus=surplus)


@functools.cache
def fixed_releases(issue: KnownIssue) -> tuple[FixedReleases, ...]:
    """What is right under each strategy under which the issue shows; strategies with the same answer are together.

    For an issue that shows nowhere by itself, the stacks on which others stop its suite count as its problem.
    """
    return _answers(issue, _is_problem) or _answers(issue, lambda prediction: prediction.verdict.is_problem)


def _is_problem(prediction: Prediction) -> bool:
    return prediction.verdict.is_own_problem


def _answers(issue: KnownIssue, is_problem: Judge) -> tuple[FixedReleases, ...]:
    together: dict[tuple[int, ...], list[str]] = {}
    for strategy in issue.labels():
        # Strategies of which the same predictions speak have the same answer.
        key = tuple(n for n, prediction in enumerate(issue.predictions) if prediction.concerns("upstream", strategy))
        together.setdefault(key, []).append(strategy)
    answers: dict[tuple[str, ...], FixedReleases] = {}
    for strategies in together.values():
        alternatives = _alternatives(issue, strategies[0], is_problem)
        if alternatives is not None:
            key_of_text = tuple(alternative.describe() for alternative in alternatives)
            before = answers.get(key_of_text, FixedReleases((), alternatives))
            answers[key_of_text] = FixedReleases((*before.strategies, *strategies), alternatives)
    return tuple(answers.values())


@functools.cache
def _everywhere() -> Projection:
    return Projection({package: parse(text) for package, text in _OLDEST.items()})


def _alternatives(issue: KnownIssue, strategy: str, is_problem: Judge) -> tuple[Alternative, ...] | None:
    """The fewest that cover all that is right; ``None`` where the issue shows on no stack under this strategy."""
    predicted = _everywhere().regions(issue.predictions, "upstream", strategy)
    problems = [
        point for point, prediction in predicted.predicted.items() if prediction is not None and is_problem(prediction)
    ]
    if not problems:
        return None
    left = {
        point
        for point, prediction in predicted.predicted.items()
        if prediction is not None and prediction.verdict is Verdict.OK
    }
    right = frozenset(left)
    boxes = [(box, _inside(box, right)) for box in _largest_without(problems, predicted.axes)]
    chosen: list[Alternative] = []
    while left:
        box, points = min(
            ((box, points) for box, points in boxes if points & left),
            key=lambda candidate: (_constraints(candidate[0], predicted.axes), -len(candidate[1] & left)),
        )
        chosen.append(_alternative(box, points, points & left, predicted.axes))
        left -= points
    return tuple(sorted(chosen, key=lambda alternative: (not alternative.lasting, len(alternative.ranges))))


def _largest_without(points: Iterable[Point], axes: Sequence[Axis]) -> set[Box]:
    """All boxes that hold none of the points and lie in no larger such box."""
    boxes: set[Box] = {tuple(frozenset(range(len(axis.pieces))) for axis in axes)}
    for point in points:
        hit = {box for box in boxes if all(n in pieces for n, pieces in zip(point, box, strict=True))}
        # A box that holds the point falls into parts, each without that point's piece of one axis.
        parts = {part for box in hit for part in _without(box, point)}
        # Of these none lies in a part: it would have lain in the whole.
        boxes -= hit
        cut = boxes | parts
        boxes |= {part for part in parts if not any(part != other and _lies_in(part, other) for other in cut)}
    return boxes


def _without(box: Box, point: Point) -> set[Box]:
    parts = ((*box[:axis], box[axis] - {piece}, *box[axis + 1 :]) for axis, piece in enumerate(point))
    return {part for part in parts if all(part)}


def _lies_in(box: Box, other: Box) -> bool:
    return all(ours <= theirs for ours, theirs in zip(box, other, strict=True))


def _inside(box: Box, points: Iterable[Point]) -> set[Point]:
    return {point for point in points if all(n in pieces for n, pieces in zip(point, box, strict=True))}


def _constraints(box: Box, axes: Sequence[Axis]) -> int:
    return sum(len(pieces) < len(axis.pieces) for pieces, axis in zip(box, axes, strict=True))


def _alternative(box: Box, right: set[Point], new: set[Point], axes: Sequence[Axis]) -> Alternative:
    """Without the ends of ranges where nothing is right, for want of a trainer, say.

    Args:
        right: what is right in the box.
        new: what of it no earlier alternative has. An alternative that does not last shrinks to it.
    """
    constrained = [number for number, axis in enumerate(axes) if len(box[number]) < len(axis.pieces)]
    # It lasts if the box, which holds no problem, goes on to the end from the newest piece where something is right.
    newest = [max(point[number] for point in right) for number in constrained]
    lasting = any([point[number] for number in constrained] == newest for point in new) and all(
        box[number].issuperset(range(last, len(axes[number].pieces)))
        for number, last in zip(constrained, newest, strict=True)
    )
    ranges: dict[str, Range] = {}
    for number in constrained:
        used = {point[number] for point in (right if lasting else new)}
        union = Range(())
        for n in box[number]:
            if min(used) <= n <= max(used):
                union |= axes[number].pieces[n]
        ranges[axes[number].package] = union
    return Alternative({package: ranges[package] for package in sorted(ranges, key=_place)}, lasting)


def _place(package: str) -> int:
    return (*_FIRST, *PACKAGES).index(package)
