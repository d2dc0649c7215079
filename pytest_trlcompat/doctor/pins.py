"""The measured cells to recommend: those that show no known issue, or the fewest, and have what the question is about.

Imports no package of the stack.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from pytest_trlcompat.catalog.evidence import MeasuredCell
from pytest_trlcompat.catalog.existence import absent_strategy
from pytest_trlcompat.catalog.issue import TRAINERS, KnownIssue, kind, measured_with
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.ranges import ALL, Range, at
from pytest_trlcompat.catalog.regions import regions
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.doctor.applicable import labels
from pytest_trlcompat.doctor.stack_spec import StackSpec
from pytest_trlcompat.stack import OPTIONAL

__all__ = ["Pins", "Scope", "fewest_issues", "has_only", "is_at", "ok_pins", "trainers_in"]


@dataclass(frozen=True)
class Pins:
    """A measured cell in which no known issue but ``issues`` shows under ``strategies``."""

    cell: MeasuredCell
    strategies: tuple[str, ...]
    issues: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scope:
    """What a question is about.

    Attributes:
        catalog: the known issues that can affect who asks.
        trainers: those that a recommended cell must have.
        foreign: ids of known issues of trainers that are not asked about; what they stop is stopped for others.
    """

    catalog: Catalog
    considered: tuple[str, ...]
    trainers: Collection[str] = TRAINERS
    foreign: Collection[str] = ()
    _upstream: dict[str, list[tuple[str, str, str, Verdict]]] = field(default_factory=dict)
    _labels: dict[tuple[str, tuple[str, ...]], frozenset[str]] = field(default_factory=dict)

    @functools.cached_property
    def measured_with(self) -> dict[str, str]:
        """Of each known issue the trainer that its suite runs."""
        return {name: measured_with(name) for name in self.catalog}

    def upstream(self, cell: MeasuredCell) -> list[tuple[str, str, str, Verdict]]:
        """What a cell measured of these issues: for each verdict issue, strategy, and this without its variant."""
        found = self._upstream.get(cell.id)
        if found is None:
            found = self._upstream[cell.id] = [
                (name, label, kind(label), verdict)
                for (name, subject, label), verdict in cell.verdicts.items()
                if subject == "upstream" and name in self.catalog
            ]
        return found

    def labels(self, issue: KnownIssue, considered: Sequence[str]) -> frozenset[str]:
        """The issue's strategies among some."""
        key = issue.id, tuple(considered)
        if key not in self._labels:
            self._labels[key] = frozenset(labels(issue, considered))
        return self._labels[key]

    def lacks_trainer(self, cell: MeasuredCell) -> bool:
        """Whether one of the trainers was always ``absent`` in a cell, under whichever strategy; where nothing was
        measured with it there, whether that is what the catalogue predicts.
        """
        seen: dict[str, bool] = {}
        for name, _, _, verdict in self.upstream(cell):
            trainer = self.measured_with[name]
            seen[trainer] = seen.get(trainer, False) or verdict is not Verdict.ABSENT
        return not all(seen[each] if each in seen else self._may_have(each, cell) for each in self.trainers)

    def lacks_strategy(self, cell: MeasuredCell, considered: Sequence[str]) -> bool:
        """Whether one of the trainers does not have one of the strategies in a cell, unless it was seen to train."""
        versions = {package: at(text) for package, text in cell.versions.items()}
        trained = {
            (self.measured_with[name], strategy)
            for name, _, strategy, verdict in self.upstream(cell)
            if verdict in (Verdict.OK, Verdict.SILENT, Verdict.WASTEFUL)
        }
        return any(
            absent_strategy(kind(name), versions, trainer) is not None and (trainer, kind(name)) not in trained
            for name in considered
            for trainer in self.trainers
        )

    def _may_have(self, trainer: str, cell: MeasuredCell) -> bool:
        """By the predictions for a cell; so it may where there are none."""
        own = (issue for name, issue in self.catalog.items() if self.measured_with[name] == trainer)
        every = (issue.predict("upstream", label, cell.versions) for issue in own for label in issue.labels())
        found = (each.verdict is not Verdict.ABSENT for each in every if each is not None)
        first = next(found, None)
        return first is None or first or any(found)


def has_only(cell: MeasuredCell, spec: StackSpec) -> bool:
    """Whether a cell has none of the packages that most stacks do not have, but those that this one has."""
    return all(spec.versions.get(package) is not None for package in OPTIONAL if package in cell.versions)


def trainers_in(spec: StackSpec, catalog: Catalog) -> tuple[str, ...]:
    """The trainers that the stack's trl has, or may have, by the predictions; all of them if these do not say."""
    domain = {"trl": spec.versions.get("trl", ALL)}
    found = tuple(
        trainer
        for trainer in TRAINERS
        if any(
            prediction is not None and prediction.verdict is not Verdict.ABSENT
            for issue in catalog.values()
            if measured_with(issue.id) == trainer
            for label in issue.labels()
            for prediction in regions(issue, "upstream", label, domain).predicted.values()
        )
    )
    return found or TRAINERS


def ok_pins(spec: StackSpec, cells: Sequence[MeasuredCell], scope: Scope) -> tuple[Pins, ...]:
    """The nearest cell that is ``ok`` for all strategies, after one with the stack's own trl that is so for most.

    If no cell is ``ok`` for all and none has this trl, the one for most may have any trl.
    """
    considered = scope.considered
    found = []
    every = next((cell for cell in cells if _is_ok(cell, scope, considered)), None)
    if every is None or not _has_same_trl(spec, every):
        kept = [cell for cell in cells if _has_same_trl(spec, cell)] or (cells if every is None else [])
        fine = [(cell, tuple(name for name in considered if _is_ok(cell, scope, (name,)))) for cell in kept]
        best = max(fine, key=lambda each: len(each[1]), default=None)  # the nearest of those with the most
        if best is not None and best[1]:
            found.append(Pins(*best))
    return tuple(found) if every is None else (*found, Pins(every, considered))


def _has_same_trl(spec: StackSpec, cell: MeasuredCell) -> bool:
    """Whether a cell has the stack's trl."""
    return is_at(cell, "trl", spec.versions.get("trl"))


def is_at(cell: MeasuredCell, package: str, wanted: Range | None) -> bool:
    """Whether a cell has a version of a package that is wanted."""
    text = cell.versions.get(package)
    return wanted is not None and text is not None and wanted.covers(at(text))


def fewest_issues(cells: Sequence[MeasuredCell], scope: Scope, fewer_than: int) -> Pins | None:
    """The nearest of the cells with the fewest issues under all strategies, if these are fewer than so many."""
    best = None
    for cell in cells:
        found = _shown(cell, scope, scope.considered, fewer_than - 1)
        if found is not None:
            best, fewer_than = Pins(cell, scope.considered, found), len(found)
    return best


def _is_ok(cell: MeasuredCell, scope: Scope, considered: Sequence[str]) -> bool:
    """Whether a cell shows no issue, and has every strategy."""
    return _shown(cell, scope, considered, 0) is not None


def _shown(cell: MeasuredCell, scope: Scope, considered: Sequence[str], limit: int) -> tuple[str, ...] | None:
    """Ids of the issues that a cell shows, by its verdicts, and by the catalogue where it has none.

    ``None`` for more than ``limit`` of them, where something could not be tested, and where all verdicts with one of
    the trainers, or with it under a strategy, are ``absent``: such a cell lacks that trainer, or the strategy.
    """
    measured: dict[str, dict[str, Verdict]] = {}
    found: dict[tuple[str, str], set[Verdict]] = {}
    if scope.lacks_trainer(cell) or scope.lacks_strategy(cell, considered):
        return None
    for name, label, plain, verdict in scope.upstream(cell):
        if label in considered or plain in considered:
            measured.setdefault(name, {})[label] = verdict
            found.setdefault((scope.measured_with[name], plain), set()).add(verdict)
    for (trainer, _), verdicts in found.items():
        if Verdict.UNTESTABLE in verdicts or (verdicts == {Verdict.ABSENT} and trainer in scope.trainers):
            return None
    shown = {name for name, by_label in measured.items() if _has_problem(cell, scope, name, by_label)}
    for issue in scope.catalog.values():
        if len(shown) > limit:
            return None
        if issue.id in shown or not issue.is_problem_somewhere:
            continue
        unmeasured = scope.labels(issue, considered) - measured.get(issue.id, {}).keys()
        predicted = (issue.predict("upstream", label, cell.versions) for label in unmeasured)
        if any(each is not None and each.verdict.is_problem and each.by not in scope.foreign for each in predicted):
            shown.add(issue.id)
    return tuple(name for name in scope.catalog if name in shown) if len(shown) <= limit else None


def _has_problem(cell: MeasuredCell, scope: Scope, name: str, verdicts: dict[str, Verdict]) -> bool:
    """Whether a measured verdict on an issue is a problem, and not one that an issue of another trainer explains."""
    problems = [label for label, verdict in verdicts.items() if verdict.is_problem]
    if not problems or not scope.foreign:
        return bool(problems)
    for label in problems:
        predicted = scope.catalog[name].predict("upstream", label, cell.versions)
        if predicted is None or predicted.by not in scope.foreign:
            return True
        if not cell.gave((name, "upstream", label), predicted.verdict, predicted.by):
            return True
    return False
