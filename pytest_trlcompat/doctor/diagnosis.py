"""The diagnosis of a stack: which known issues affect it, under which strategies, and which pins are ``ok``."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_trlcompat.catalog import remedies
from pytest_trlcompat.catalog.issue import SEVERITIES, KnownIssue, Prediction, kind, measured_with
from pytest_trlcompat.catalog.issue import TRAINERS as MEASURED
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.measurements import Cell, Measurements
from pytest_trlcompat.catalog.ranges import ALL
from pytest_trlcompat.catalog.regions import Projection
from pytest_trlcompat.catalog.verdict import SEVERITY, Verdict
from pytest_trlcompat.doctor.applicable import considered_strategies, partly_absent, summary
from pytest_trlcompat.doctor.beyond import describe, other_python, other_torch, torch_of_same_pins, unmeasured_releases
from pytest_trlcompat.doctor.effects import Effect, effects_of, uncured
from pytest_trlcompat.doctor.neighbours import Neighbours
from pytest_trlcompat.doctor.pins import Pins, Scope, fewest_issues, ok_pins, trainers_in, unmeasured_strategies
from pytest_trlcompat.doctor.presence import check_trainer, class_in
from pytest_trlcompat.doctor.stack_spec import StackSpec
from pytest_trlcompat.strategies.dimensions import parts_of

__all__ = ["SCHEMA", "ApplicableIssue", "Diagnosis", "diagnose", "is_predicted"]

SCHEMA = 3
"""Of :meth:`Diagnosis.to_dict`; see docs/reference/doctor.schema.json."""


@dataclass(frozen=True)
class ApplicableIssue:
    """A known issue that affects the stack, or may.

    Attributes:
        uncured: why the corrected trainer is not ``ok`` either; empty if it is.
    """

    issue: KnownIssue
    effects: tuple[Effect, ...]
    uncured: str = ""

    @property
    def judged(self) -> bool:
        """Whether it has an effect of its own, and not only a suite that other known issues stop first."""
        return not all(effect.blocked_by for effect in self.effects)

    @property
    def ends_a_plain_training(self) -> bool:
        """Whether it raises in a training that sets nothing out of the ordinary, under one of the strategies."""
        if self.issue.when or self.issue.needs or all(effect.verdict is not Verdict.BROKEN for effect in self.effects):
            return False
        return any(parts_of(label)[2] in ("", "default") for label in self.issue.labels())

    @property
    def siblings(self) -> str:
        """What its id has in common with the ids of other trainers' issues of the same kind: ``attention-dropout``."""
        return self.issue.id.removeprefix("first-").removeprefix(f"{self.issue.trainer}-")

    @property
    def strategies(self) -> tuple[str, ...]:
        """Those under which it has an effect."""
        return tuple(label for effect in self.effects for label in effect.strategies)


@dataclass(frozen=True)
class Diagnosis:
    """The answer for one stack.

    Attributes:
        strategies: those that were considered.
        issues: those that affect the stack, the worst first, then those that cannot be judged.
        clear: ids of the issues that do not affect the stack.
        unpredicted: ids of those in ``clear`` about which the catalogue makes no prediction for this stack and trainer.
        nearest: the measured cell nearest to the stack.
        pins: the nearest measured cells that are ``ok``: with the stack's own trl for some strategies, and for all.
        fewest: if no cell is ``ok`` for all strategies, the nearest of those with the fewest issues, if these are fewer
            than the stack's own.
        measured: what the sweep's cells gave.
        torch: how the stack's torch differs from those with which the sweep, or its TRL and Transformers, were
            measured; empty if its minor release was measured.
        python: how the stack's Python lies beyond those with which the sweep was measured; empty if it does not.
        left_out: strategies that were not considered, and why.
        trainer: the one that the question is about; empty for all.
        stopped_for_others: those of ``unpredicted`` of which is predicted only that issues of trainers that are not
            asked about stop their tests.
        partly_absent: sentences about strategies that were asked about, which some versions of the stack do not have.
        unmeasured: see :func:`~pytest_trlcompat.doctor.beyond.unmeasured_releases`.
        nobody_measured: the considered strategies under which no cell was measured with the trainer; no pins are
            recommended for them.
    """

    spec: StackSpec
    strategies: tuple[str, ...]
    issues: tuple[ApplicableIssue, ...]
    clear: tuple[str, ...]
    measured: Measurements
    unpredicted: tuple[str, ...] = ()
    nearest: Cell | None = None
    pins: tuple[Pins, ...] = ()
    fewest: Pins | None = None
    torch: str = ""
    left_out: str = ""
    trainer: str = ""
    unmeasured: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    python: str = ""
    stopped_for_others: tuple[str, ...] = ()
    partly_absent: tuple[str, ...] = ()
    nobody_measured: tuple[str, ...] = ()

    @property
    def is_clear(self) -> bool:
        """Whether all that was asked about is there and is right, by what is predicted or measured for who asks.

        That no known issue was found says nothing of an issue without a prediction, of a trainer with which no suite
        trains, and of versions that do not have the strategy.
        """
        return not (self.issues or self.unpredicted or self.unmeasured_trainer or self.partly_absent)

    @property
    def predicted(self) -> bool:
        """Whether also that an issue does not affect the stack is predicted from other releases, none of its own."""
        return bool(self.unmeasured or self.torch or self.python)

    @property
    def unmeasured_trainer(self) -> str:
        """The class of the trainer that the question is about, where no sweep trains with it; else empty."""
        if not self.trainer or self.trainer in MEASURED:
            return ""
        return class_in(self.trainer, self.spec)

    @property
    def summary(self) -> str:
        """How many known issues affect the stack, as a clause."""
        if self.issues:
            return summary(self.counts["affect"], self.counts["cannot_be_judged"])
        return summary(0, len(self.unpredicted), measured=not self.predicted)

    @property
    def unmeasured_text(self) -> str:
        """:attr:`unmeasured` for people; empty if all was measured."""
        return describe(self.unmeasured, self.spec.texts)

    @property
    def own_trainer(self) -> str:
        """How a user's own trainer gets the cures of the issues; empty where none has a cure for it."""
        return remedies.own_trainer([applicable.issue for applicable in self.issues], self.trainer, self.measured.ways)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the person who asked: how the stack was read, and what the answer cannot say."""
        notes = (*self.spec.notes, *self.partly_absent)
        if not (name := self.unmeasured_trainer):
            return notes
        return (
            *notes,
            f"no sweep trains with {name}: what is said here was measured with GRPO alone, and an issue that only "
            f"{name} has is not known here",
        )

    @property
    def counts(self) -> dict[str, int]:
        """How many known issues affect the stack, may and cannot be judged, are without a prediction, and do not."""
        judged = sum(applicable.judged for applicable in self.issues)
        return {
            "affect": judged,
            "cannot_be_judged": len(self.issues) - judged,
            "not_predicted": len(self.unpredicted),
            "do_not_affect": len(self.clear) - len(self.unpredicted),
        }

    def reaches(self, severity: str) -> bool:
        """Whether an issue of this severity or a worse one affects the stack, and can be judged."""
        worst = SEVERITIES.index(severity)
        return any(each.judged and SEVERITIES.index(each.issue.severity) <= worst for each in self.issues)

    def remedy(self, applicable: ApplicableIssue) -> str:
        """What to do about an issue with this stack, under the strategies under which it is a problem by itself."""
        unblocked = [effect for effect in applicable.effects if effect.otherwise or not effect.blocked_by]
        under = [label for effect in unblocked or applicable.effects for label in effect.strategies]
        return remedies.remedy(
            applicable.issue,
            under,
            trainer=self.trainer,
            versions=self.spec.versions,
            ways=self.measured.ways(applicable.issue),
        )

    def stopped_by(self, applicable: ApplicableIssue) -> tuple[str, ...]:
        """The known issues because of which nothing but the name of this one need be said; empty if there is more.

        Each of them affects the stack itself, under the same strategies and conditions. Where one does not stop it, as
        on another machine, no problem is predicted.
        """
        if applicable.judged or any(effect.otherwise for effect in applicable.effects):
            return ()
        for effect in applicable.effects:
            for label in effect.strategies:
                if self._shown.isdisjoint(
                    (effect.blocked_by, kind(label), condition) for condition in ("", effect.condition)
                ):
                    return ()
        return tuple(sorted({effect.blocked_by for effect in applicable.effects}))

    @functools.cached_property
    def _shown(self) -> frozenset[tuple[str, str, str]]:
        """The known issues that affect the stack themselves, each with a strategy and a condition."""
        return frozenset(
            (applicable.issue.id, kind(label), effect.condition)
            for applicable in self.issues
            for effect in applicable.effects
            if not effect.blocked_by
            for label in effect.strategies
        )

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "schema": SCHEMA,
            "source": self.spec.source,
            "stack": dict(self.spec.texts),
            "forks": [
                {package: versions.describe() for package, versions in stack.items() if versions != ALL}
                for stack in self.spec.together
            ],
            "unknown": self.spec.unknown,
            "absent": self.spec.absent,
            "trainer": self.trainer,
            "notes": list(self.notes),
            "strategies": list(self.strategies),
            "left_out": self.left_out,
            "measured": self.measured.date,
            "torch": self.torch,
            "python": self.python,
            "unmeasured": {name: list(around) for name, around in self.unmeasured.items()},
            "counts": self.counts,
            "issues": [_issue_to_dict(applicable, self) for applicable in self.issues],
            "clear": list(self.clear),
            "unpredicted": list(self.unpredicted),
            "nearest": self.nearest.id if self.nearest else None,
            "ok_pins": [
                {
                    "cell": pins.cell.id,
                    "versions": dict(pins.cell.versions),
                    "strategies": list(pins.strategies),
                    "trainers": list(pins.trainers),
                }
                for pins in self.pins
            ],
            "nobody_measured": list(self.nobody_measured),
            "fewest_issues": self.fewest
            and {
                "cell": self.fewest.cell.id,
                "versions": dict(self.fewest.cell.versions),
                "issues": list(self.fewest.issues),
            },
        }


def _issue_to_dict(applicable: ApplicableIssue, diagnosis: Diagnosis) -> dict[str, Any]:
    issue, ways = applicable.issue, diagnosis.measured.ways(applicable.issue)
    return {
        "id": issue.id,
        "title": issue.title,
        "severity": issue.severity,
        "wrong": issue.wrong,
        "symptoms": [{"type": symptom.type_name, "text": symptom.pattern.pattern} for symptom in issue.symptoms],
        "remedy": diagnosis.remedy(applicable),
        "cure": issue.cure,
        "mixins": list(remedies.mixins(issue, diagnosis.trainer, ways)),
        "cured_in": remedies.cured_in(issue, ways),
        "uncured": applicable.uncured,
        "measured_with": measured_with(issue.id),
        "upstream": list(issue.upstream),
        "suite": issue.suite,
        "when": [
            {
                "strategies": list(effect.strategies),
                "verdict": effect.verdict.value,
                "condition": effect.condition,
                "why": effect.why,
                **({"blocked_by": effect.blocked_by} if effect.blocked_by else {}),
                **({"otherwise": effect.otherwise} if effect.otherwise else {}),
                **({"cause_predicted": True} if effect.confidence.cause_predicted else {}),
                "confidence": effect.confidence.level.value,
                "cells": list(effect.confidence.cells),
                "measured_under": effect.confidence.strategy,
                "measured_with_torch": effect.confidence.torch,
            }
            for effect in applicable.effects
        ],
    }


def diagnose(
    spec: StackSpec, catalog: Catalog, measured: Measurements, strategies: Sequence[str] = (), trainer: str = ""
) -> Diagnosis:
    """Which known issues affect a stack, by the catalogue and what was measured.

    Args:
        catalog: all known issues.
        measured: what the cells gave with them.
        trainer: a key of ``TRAINERS``: leave out what only users of other trainers meet; empty for none.

    Raises:
        StrategyError: the trainer, or a strategy, is absent from the stack; see
            :func:`~pytest_trlcompat.doctor.applicable.considered_strategies`.
    """
    if trainer:
        check_trainer(trainer, spec, catalog)
    considered, left_out = considered_strategies(strategies, spec, trainer)
    relevant = Catalog({issue.id: issue for issue in catalog.values() if issue.meets(trainer) and not issue.is_search})
    foreign = {issue.id for issue in catalog.values() if not issue.meets(trainer)}
    projection, neighbours = Projection(spec.versions, spec.together), Neighbours(spec, measured)
    issues: list[ApplicableIssue] = []
    clear: list[str] = []
    for issue in relevant.values():
        effects = effects_of(issue, projection, neighbours, considered, foreign)
        if effects:
            issues.append(ApplicableIssue(issue, effects, uncured(issue, projection, effects)))
        else:
            clear.append(issue.id)
    unpredicted = tuple(
        name
        for name in clear
        if not is_predicted(relevant[name], relevant[name].without_blockers(foreign), projection, considered)
    )
    stopped = Counter(name for applicable in issues for name in {effect.blocked_by for effect in applicable.effects})
    issues.sort(key=lambda applicable: _order(applicable, stopped[applicable.issue.id]))
    trainers = (trainer,) if trainer else trainers_in(spec, catalog)
    scope = Scope(relevant, considered, neighbours, trainers, foreign, trainer)
    # Where a trainer's own suites were not run, that a cell is without known issues says too little.
    recommendable = not trainer or trainer in MEASURED
    pins = ok_pins(scope) if issues and recommendable else ()
    nobody_measured = unmeasured_strategies(scope) if recommendable else considered
    ok_for_all = any(len(pin.strategies) == len(considered) - len(nobody_measured) for pin in pins)
    return Diagnosis(
        spec=spec,
        strategies=considered,
        issues=tuple(issues),
        clear=tuple(clear),
        unpredicted=unpredicted,
        stopped_for_others=tuple(
            name
            for name in unpredicted
            if is_predicted(relevant[name], relevant[name].predictions, projection, considered)
        ),
        partly_absent=partly_absent(strategies, spec, trainer),
        nobody_measured=nobody_measured,
        measured=measured,
        nearest=measured.cells[neighbours.order[0]] if neighbours.order else None,
        pins=pins,
        fewest=None if ok_for_all or not recommendable else fewest_issues(scope, len(issues)),
        torch=other_torch(spec, filter(None, measured.having("torch"))) or torch_of_same_pins(neighbours),
        left_out=left_out,
        trainer=trainer,
        unmeasured=unmeasured_releases(neighbours, {name for issue in relevant.values() for name in issue.packages}),
        python=other_python(spec, (cell.id for cell in measured.cells)),
    )


def _order(applicable: ApplicableIssue, stopped: int) -> tuple[object, ...]:
    """What ends an import or the first step, whatever is silent behind it, comes first, then the worst; siblings stand
    together, and what cannot be judged comes last.

    Args:
        stopped: how many others it stops.
    """
    severity = applicable.issue.severity
    rank: tuple[int, ...] = (2 + SEVERITIES.index(severity),)
    if severity == "crash" and applicable.ends_a_plain_training:
        rank = (0, int(bool(applicable.issue.trainer)), -stopped)  # what meets every trainer, such as an import, first
    elif severity == "crash" and stopped:
        rank = (1, -stopped)
    verdict = min(SEVERITY.index(effect.verdict) for effect in applicable.effects)
    return not applicable.judged, rank, verdict, applicable.siblings, applicable.issue.id


def is_predicted(
    issue: KnownIssue, predictions: Sequence[Prediction], projection: Projection, considered: Sequence[str]
) -> bool:
    """Whether some of an issue's predictions say a verdict for this stack, for any version of the packages not known.

    That an issue cannot show because a package is missing that it needs also counts as a prediction.
    """
    if not issue.can_show(projection.domain):
        return True
    relevant = issue.labels_among(considered)
    by_label = (projection.regions(predictions, "upstream", label).predicted.values() for label in relevant)
    return not relevant or any(prediction is not None for predicted in by_label for prediction in predicted)
