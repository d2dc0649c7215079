"""The measured cells to recommend: they show no known issue, or the fewest, and have what the question is about."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pytest_trlcompat.catalog import existence
from pytest_trlcompat.catalog.issue import TRAINERS, KnownIssue, kind, measured_with
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.measurements import Cell, CellSet
from pytest_trlcompat.catalog.ranges import ALL, parse
from pytest_trlcompat.catalog.regions import Projection
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.doctor.neighbours import Neighbours
from pytest_trlcompat.doctor.stack_spec import StackSpec

__all__ = ["Pins", "Scope", "fewest_issues", "ok_pins", "trainers_in", "unmeasured_strategies"]

_PROBLEMS = frozenset(verdict.value for verdict in Verdict if verdict.is_problem)
_TRAINED = [verdict.value for verdict in (Verdict.OK, Verdict.SILENT, Verdict.WASTEFUL)]
_ABSENT, _UNTESTABLE = Verdict.ABSENT.value, Verdict.UNTESTABLE.value


@dataclass(frozen=True)
class Pins:
    """A measured cell in which no known issue but ``issues`` shows under ``strategies``.

    Attributes:
        trainers: those with which the cell was measured under one of these strategies.
    """

    cell: Cell
    strategies: tuple[str, ...]
    issues: tuple[str, ...] = ()
    trainers: tuple[str, ...] = ()


class _Line(NamedTuple):
    """One known issue under one strategy, in all cells.

    Attributes:
        trainer: that its suite runs.
        strategy: the label without its variant.
        is_listed: whether the entry lists the label; otherwise some cell has measured it.
        measured: the cells with a verdict.
        problems: those of them whose verdict is a problem that no issue of a trainer that is not asked about explains.
        predicted: the cells for which a problem is predicted, by no such issue.
    """

    issue: str
    trainer: str
    label: str
    strategy: str
    is_listed: bool
    measured: CellSet
    problems: CellSet
    predicted: CellSet
    absent: CellSet
    untestable: CellSet


@dataclass(frozen=True)
class Scope:
    """What a question is about.

    Attributes:
        catalog: the known issues that can affect who asks.
        considered: the strategies.
        trainers: those that a recommended cell must have.
        foreign: ids of known issues of trainers that are not asked about; what they stop is stopped for others.
        asked: the trainer that the question is about, which a recommended cell must have been measured with under each
            strategy; empty for all, of which it must have been measured with one.
    """

    catalog: Catalog
    considered: tuple[str, ...]
    neighbours: Neighbours
    trainers: Collection[str] = TRAINERS
    foreign: Collection[str] = ()
    asked: str = ""

    @functools.cached_property
    def _lines(self) -> list[_Line]:
        return [line for issue in self.catalog.values() for line in self._lines_of(issue)]

    def _lines_of(self, issue: KnownIssue) -> Iterator[_Line]:
        measured = self.neighbours.measured
        trainer, listed, verdicts_of = measured_with(issue.id), issue.labels(), measured.verdicts(issue.id)
        for label in dict.fromkeys([*listed, *verdicts_of]):
            verdicts = verdicts_of.get(label, {})
            problems = _union(cells for name, cells in verdicts.items() if name in _PROBLEMS)
            predicted = 0
            for prediction, cells in measured.predicted(issue, label):
                if prediction.by and prediction.by in self.foreign:
                    problems &= ~(cells & measured.gave(issue.id, label, prediction.verdict, prediction.by))
                elif prediction.verdict.is_problem:
                    predicted |= cells
            yield _Line(
                issue.id,
                trainer,
                label,
                kind(label),
                label in listed,
                _union(verdicts.values()),
                problems,
                predicted,
                verdicts.get(_ABSENT, 0),
                verdicts.get(_UNTESTABLE, 0),
            )

    def _asked(self, considered: Sequence[str]) -> Iterator[_Line]:
        """The lines that some strategies are about; without a variant they are about all their variants."""
        for strategy, lines in self._by_strategy.items():
            if strategy in considered:
                yield from lines
            else:
                yield from (line for line in lines if line.label in considered)

    @functools.cached_property
    def _by_strategy(self) -> dict[str, list[_Line]]:
        by_strategy: dict[str, list[_Line]] = {}
        for line in self._lines:
            by_strategy.setdefault(line.strategy, []).append(line)
        return by_strategy

    def shown(self, considered: Sequence[str]) -> dict[str, CellSet]:
        """By known issue the cells that show it under some strategies: by their verdicts, and by the catalogue where
        they have none."""
        shown: dict[str, CellSet] = {}
        for line in self._asked(considered):
            if cells := line.problems | (line.predicted & ~line.measured if line.is_listed else 0):
                shown[line.issue] = shown.get(line.issue, 0) | cells
        variants = [name for name in considered if kind(name) != name]
        if variants:  # of an issue that does not list one, its strategy is asked about
            listed = {(line.issue, line.label) for line in self._lines if line.is_listed}
            for line in self._lines:
                if line.is_listed and any(
                    kind(name) == line.label and (line.issue, name) not in listed for name in variants
                ):
                    asked = line.label in considered
                    cells = line.predicted & ~line.measured if asked else line.predicted
                    shown[line.issue] = shown.get(line.issue, 0) | cells
        return {name: shown[name] for name in self.catalog if name in shown}

    def usable(self, considered: Sequence[str]) -> CellSet:
        """The cells in which all could be tested, and that have each of the trainers, under each strategy, of which the
        one that is asked about was measured there.

        Where all verdicts with a trainer, or with it under a strategy, are ``absent``, the cell does not have it.
        """
        strategies = {kind(name) for name in considered}
        if strategies <= set(considered):  # no variant is asked about alone: each strategy has an answer of its own
            judged = [self._untestable_or_absent.get(strategy, (0, 0)) for strategy in strategies]
            untestable, lacking = _union(cells for cells, _ in judged), _union(cells for _, cells in judged)
        else:
            untestable, lacking = self._of_lines(self._asked(considered))
        lacking |= _union(self._lacking(trainer, strategy) for trainer in self.trainers for strategy in strategies)
        for strategy in strategies if self.asked else ():
            lacking |= ~self.trained(self.asked, strategy)
        return self._with_trainers & ~lacking & ~untestable

    @functools.cached_property
    def _untestable_or_absent(self) -> dict[str, tuple[CellSet, CellSet]]:
        """:meth:`_of_lines` of each strategy with all its variants."""
        return {strategy: self._of_lines(lines) for strategy, lines in self._by_strategy.items()}

    def _of_lines(self, lines: Iterable[_Line]) -> tuple[CellSet, CellSet]:
        """The cells in which something could not be tested, and those in which all with a trainer was absent."""
        untestable = 0
        absent: dict[tuple[str, str], CellSet] = {}
        present: dict[tuple[str, str], CellSet] = {}
        for line in lines:
            if line.measured:
                key = line.trainer, line.strategy
                untestable |= line.untestable
                absent[key] = absent.get(key, 0) | line.absent
                present[key] = present.get(key, 0) | line.measured & ~line.absent
        return untestable, _union(absent[key] & ~present[key] for key in absent if key[0] in self.trainers)

    def trained(self, trainer: str, strategy: str) -> CellSet:
        """The cells in which a known issue was judged with a trainer under a strategy, without a variant."""
        return self._trained.get((trainer, strategy), 0)

    @functools.cached_property
    def _trained(self) -> dict[tuple[str, str], CellSet]:
        trained: dict[tuple[str, str], CellSet] = {}
        for line in self._lines:
            key = line.trainer, line.strategy
            trained[key] = trained.get(key, 0) | line.measured & ~line.absent & ~line.untestable
        return trained

    def trained_in(self, number: int, considered: Sequence[str]) -> tuple[str, ...]:
        """The trainers with which a cell was measured under one of some strategies."""
        strategies = {kind(name) for name in considered}
        return tuple(
            trainer
            for trainer in TRAINERS
            if any(self.trained(trainer, strategy) >> number & 1 for strategy in strategies)
        )

    def _lacking(self, trainer: str, strategy: str) -> CellSet:
        """The cells in which a trainer does not have a strategy, unless it was seen to train."""
        measured = self.neighbours.measured
        lacking = 0
        for absence in existence.STRATEGIES:
            if absence.concerns(strategy, trainer):
                here = measured.every
                for package, text in absence.when.items():
                    here &= measured.where(package, parse(text).covers)
                lacking |= here
        if lacking:
            for line in self._lines:
                if line.trainer == trainer and line.strategy == strategy:
                    verdicts = measured.verdicts(line.issue).get(line.label, {})
                    lacking &= ~_union(verdicts.get(name, 0) for name in _TRAINED)
        return lacking

    @functools.cached_property
    def _with_trainers(self) -> CellSet:
        """The cells in which each of the trainers was seen, under whichever strategy; where nothing was measured with
        it, the catalogue must predict something else than its absence, or nothing."""
        cells = self.neighbours.measured.every
        for trainer in self.trainers:
            lines = [line for line in self._lines if line.trainer == trainer]
            present = _union(line.measured & ~line.absent for line in lines)
            if unseen := cells & ~_union(line.measured for line in lines):
                present |= unseen & self._may_have(dict.fromkeys(line.issue for line in lines))
            cells &= present
        return cells

    def _may_have(self, names: Iterable[str]) -> CellSet:
        """The cells that have the trainer of some issues by the predictions for them; so they may where there are
        none."""
        measured = self.neighbours.measured
        absent = present = 0
        for issue in map(self.catalog.__getitem__, names):
            for label in issue.labels():
                for prediction, cells in measured.predicted(issue, label):
                    if prediction.verdict is Verdict.ABSENT:
                        absent |= cells
                    else:
                        present |= cells
        return present | measured.every & ~absent


def _union(sets: Iterable[CellSet]) -> CellSet:
    return functools.reduce(operator.or_, sets, 0)


def trainers_in(spec: StackSpec, catalog: Catalog) -> tuple[str, ...]:
    """The trainers that the stack's trl has, or may have, by the predictions; all of them if these do not say."""
    projection = Projection({"trl": spec.versions.get("trl", ALL)})
    trainers = tuple(
        trainer
        for trainer in TRAINERS
        if any(
            prediction is not None and prediction.verdict is not Verdict.ABSENT
            for issue in catalog.values()
            if measured_with(issue.id) == trainer
            for label in issue.labels()
            for prediction in projection.regions(issue.predictions, "upstream", label).predicted.values()
        )
    )
    return trainers or TRAINERS


def unmeasured_strategies(scope: Scope) -> tuple[str, ...]:
    """The considered strategies under which no cell was measured with the trainer that is asked about.

    Empty where none is asked about.
    """
    return tuple(name for name in scope.considered if scope.asked and not scope.trained(scope.asked, kind(name)))


def ok_pins(scope: Scope) -> tuple[Pins, ...]:
    """The nearest cell that is ``ok`` for all measured strategies, after one with the stack's own trl that is so for
    most.

    If no cell is ``ok`` for all and none has this trl, the one for most may have any trl. Nothing is recommended for
    :func:`unmeasured_strategies`.
    """
    neighbours, considered = scope.neighbours, _measured_strategies(scope)
    if not considered:
        return ()
    has_same_trl = neighbours.at("trl") & neighbours.with_same_packages
    fine = _ok(scope, considered)
    every = neighbours.nearest(fine) if fine else None
    pins = []
    if every is None or not has_same_trl >> every & 1:
        candidates = has_same_trl or (neighbours.with_same_packages if every is None else 0)
        ok = {name: _ok(scope, (name,)) for name in considered}
        fine_for = [
            (number, tuple(name for name in considered if ok[name] >> number & 1))
            for number in neighbours.nearest_first(candidates)
        ]
        best = max(
            fine_for, key=lambda candidate: len(candidate[1]), default=None
        )  # the nearest of those with the most
        if best is not None and best[1]:
            pins.append(_pins(scope, best[0], best[1]))
    return tuple(pins) if every is None else (*pins, _pins(scope, every, considered))


def _measured_strategies(scope: Scope) -> tuple[str, ...]:
    unmeasured = unmeasured_strategies(scope)
    return tuple(name for name in scope.considered if name not in unmeasured)


def _pins(scope: Scope, number: int, strategies: tuple[str, ...], issues: Sequence[str] = ()) -> Pins:
    cell = scope.neighbours.measured.cells[number]
    return Pins(cell, strategies, tuple(issues), scope.trained_in(number, strategies))


def _ok(scope: Scope, considered: Sequence[str]) -> CellSet:
    """The cells that show no issue, and have every strategy."""
    return scope.usable(considered) & scope.neighbours.with_same_packages & ~_union(scope.shown(considered).values())


def fewest_issues(scope: Scope, fewer_than: int) -> Pins | None:
    """The nearest of the cells with the fewest issues under all measured strategies, if it has fewer than so many."""
    neighbours, considered = scope.neighbours, _measured_strategies(scope)
    if not considered:
        return None
    shown = scope.shown(considered)
    best = None
    for number in neighbours.nearest_first(scope.usable(considered) & neighbours.with_same_packages):
        names = [name for name, cells in shown.items() if cells >> number & 1]
        # Only fewer count, so that of equal ones the nearest stays.
        if len(names) < fewer_than:
            fewer_than = len(names)
            best = _pins(scope, number, considered, names)
    return best
