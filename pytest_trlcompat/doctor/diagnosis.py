"""The diagnosis of a stack: which known issues affect it, under which strategies, and which pins are ``ok``.

Imports no package of the stack.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_trlcompat.catalog import remedies
from pytest_trlcompat.catalog.evidence import Evidence, MeasuredCell
from pytest_trlcompat.catalog.issue import KnownIssue, Prediction, kind
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.regions import regions
from pytest_trlcompat.catalog.verdict import SEVERITY, Verdict
from pytest_trlcompat.doctor.applicable import (
    applicable_predictions,
    considered_strategies,
    labels,
    without_blockers,
)
from pytest_trlcompat.doctor.confidence import Confidence, confidence_in, distance, measured_here
from pytest_trlcompat.doctor.pins import Pins, Scope, fewest_issues, is_at, ok_pins, trainers_in
from pytest_trlcompat.doctor.stack_spec import StackSpec
from pytest_trlcompat.doctor.torch import other_torch

__all__ = ["ApplicableIssue", "Diagnosis", "Effect", "diagnose"]

_UNPREDICTED = "measured, though the catalogue predicts another verdict"


@dataclass(frozen=True)
class Effect:
    """How an issue shows under some strategies.

    Attributes:
        condition: versions, of packages whose version is not known, to which this is limited; empty if to none.
        why: the mechanism, from the catalogue.
        blocked_by: the known issue that stops this one's suite first, if the verdict is ``blocked``; else empty.
        otherwise: the problem that the catalogue predicts where that one does not stop it; empty if none.
    """

    strategies: tuple[str, ...]
    verdict: Verdict
    condition: str
    why: str
    confidence: Confidence
    blocked_by: str = ""
    otherwise: str = ""


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
        unpredicted: ids of those of them for which the catalogue makes no prediction about this stack.
        nearest: the measured cell nearest to the stack.
        pins: the nearest measured cells that are ``ok``: with the stack's own trl for some strategies, and for all.
        fewest: if no cell is ``ok`` for all strategies, the nearest of those with the fewest issues, if these are fewer
            than the stack's own.
        measured: the day of the sweep from which the evidence is.
        torch: how the stack's torch differs from those with which the sweep, or its TRL and Transformers, were
            measured; empty if its minor release was measured.
        left_out: strategies that were not considered, and why.
        trainer: the one that the question is about; empty for all.
        cells: all that were measured, the nearest first.
    """

    spec: StackSpec
    strategies: tuple[str, ...]
    issues: tuple[ApplicableIssue, ...]
    clear: tuple[str, ...]
    unpredicted: tuple[str, ...] = ()
    nearest: MeasuredCell | None = None
    pins: tuple[Pins, ...] = ()
    fewest: Pins | None = None
    measured: str = ""
    torch: str = ""
    left_out: str = ""
    trainer: str = ""
    cells: tuple[MeasuredCell, ...] = ()

    def remedy(self, applicable: ApplicableIssue) -> str:
        """What to do about an issue with this stack, under the strategies under which it is a problem by itself."""
        own = [effect for effect in applicable.effects if effect.otherwise or not effect.blocked_by]
        under = [label for effect in own or applicable.effects for label in effect.strategies]
        return remedies.remedy(
            applicable.issue, under, trainer=self.trainer, versions=self.spec.versions, cells=self.cells
        )

    def stopped_by(self, applicable: ApplicableIssue) -> tuple[str, ...]:
        """The known issues because of which nothing but the name of this one need be said; empty if there is more.

        Each of them affects the stack itself, under the same strategies and conditions. Where one does not stop it, as
        on another machine, no problem is predicted.
        """
        if applicable.judged or any(effect.otherwise for effect in applicable.effects):
            return ()
        seen = {
            (other.issue.id, kind(label), effect.condition)
            for other in self.issues
            for effect in other.effects
            if not effect.blocked_by
            for label in effect.strategies
        }
        for effect in applicable.effects:
            for label in effect.strategies:
                if seen.isdisjoint((effect.blocked_by, kind(label), each) for each in ("", effect.condition)):
                    return ()
        return tuple(sorted({effect.blocked_by for effect in applicable.effects}))

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "schema": 2,
            "source": self.spec.source,
            "stack": dict(self.spec.texts),
            "unknown": self.spec.unknown,
            "absent": self.spec.absent,
            "notes": list(self.spec.notes),
            "strategies": list(self.strategies),
            "left_out": self.left_out,
            "measured": self.measured,
            "torch": self.torch,
            "issues": [_issue_to_dict(applicable, self) for applicable in self.issues],
            "clear": list(self.clear),
            "unpredicted": list(self.unpredicted),
            "nearest": self.nearest.id if self.nearest else None,
            "ok_pins": [
                {"cell": pins.cell.id, "versions": dict(pins.cell.versions), "strategies": list(pins.strategies)}
                for pins in self.pins
            ],
            "fewest_issues": self.fewest
            and {
                "cell": self.fewest.cell.id,
                "versions": dict(self.fewest.cell.versions),
                "issues": list(self.fewest.issues),
            },
        }


def _issue_to_dict(applicable: ApplicableIssue, diagnosis: Diagnosis) -> dict[str, Any]:
    issue = applicable.issue
    return {
        "id": issue.id,
        "title": issue.title,
        "wrong": issue.wrong,
        "symptoms": [{"type": symptom.type_name, "text": symptom.pattern.pattern} for symptom in issue.symptoms],
        "remedy": diagnosis.remedy(applicable),
        "cure": issue.cure,
        "mixins": list(remedies.mixins(issue, diagnosis.trainer)),
        "cured_in": remedies.cured_in(issue),
        "uncured": applicable.uncured,
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
    spec: StackSpec, catalog: Catalog, evidence: Evidence, strategies: Sequence[str] = (), trainer: str = ""
) -> Diagnosis:
    """Which known issues affect a stack, by the catalogue and the evidence.

    Args:
        catalog: all known issues.
        trainer: leave out what only users of other trainers meet; empty for none.

    Raises:
        StrategyError: see :func:`~pytest_trlcompat.doctor.applicable.considered_strategies`.
    """
    considered, left_out = considered_strategies(strategies, spec)
    relevant = Catalog({issue.id: issue for issue in catalog.values() if not trainer or issue.trainer in ("", trainer)})
    foreign = catalog.keys() - relevant.keys()
    cells = tuple(sorted(evidence.cells, key=distance(spec)))
    evidence = dataclasses.replace(evidence, cells=cells)
    issues: list[ApplicableIssue] = []
    clear: list[str] = []
    for issue in relevant.values():
        effects = _effects(issue, spec, evidence, considered, foreign)
        if effects:
            issues.append(ApplicableIssue(issue, effects, _uncured(issue, spec, effects)))
        else:
            clear.append(issue.id)
    issues.sort(key=lambda each: min(SEVERITY.index(effect.verdict) for effect in each.effects))
    scope = Scope(relevant, considered, (trainer,) if trainer else trainers_in(spec, catalog), foreign)
    pins = ok_pins(spec, cells, scope) if issues else ()
    ok_for_all = any(each.strategies == considered for each in pins)
    return Diagnosis(
        spec=spec,
        strategies=considered,
        issues=tuple(issues),
        clear=tuple(clear),
        unpredicted=tuple(name for name in clear if not _is_predicted(relevant[name], spec, considered)),
        nearest=cells[0] if cells else None,
        pins=pins,
        fewest=None if ok_for_all else fewest_issues(cells, scope, len(issues)),
        measured=evidence.date,
        torch=other_torch(spec, evidence.torches) or _torch_of_same_pins(spec, cells),
        left_out=left_out,
        trainer=trainer,
        cells=cells,
    )


def _torch_of_same_pins(spec: StackSpec, cells: Sequence[MeasuredCell]) -> str:
    """How the stack's torch differs from those with which its TRL and Transformers were measured; may be empty."""
    pins = {package: spec.pinned.get(package) for package in ("trl", "transformers")}
    if None in pins.values():
        return ""
    same = [cell for cell in cells if all(is_at(cell, package, spec.versions[package]) for package in pins)]
    differs = other_torch(spec, [cell.versions["torch"] for cell in same if "torch" in cell.versions])
    return differs and f"{' with '.join(f'{package} {version}' for package, version in pins.items())}: {differs}"


def _is_predicted(issue: KnownIssue, spec: StackSpec, considered: Sequence[str]) -> bool:
    """Whether the catalogue predicts a verdict for this stack, for any version of the packages not known."""
    relevant = labels(issue, considered)
    found = [regions(issue, "upstream", label, spec.versions).predicted.values() for label in relevant]
    return not relevant or any(prediction is not None for predicted in found for prediction in predicted)


def _effects(
    issue: KnownIssue, spec: StackSpec, evidence: Evidence, considered: Sequence[str], foreign: Collection[str]
) -> tuple[Effect, ...]:
    """
    Args:
        foreign: ids of the known issues that stop only others: what is predicted without these counts.
    """
    found = applicable_predictions(without_blockers(issue, foreign), spec, considered)
    measured = [label for label in evidence.strategies(issue.id) if label not in (each[0] for each in found)]
    stopped = {label for label, prediction, _ in found if prediction.by}
    otherwise = _otherwise(issue, spec, stopped, [prediction for _, prediction, _ in found]) if stopped else {}
    effects = []
    for label, prediction, region in found:
        alike = [other for other, same, _ in found if same is prediction and other != label]
        # A measured variant supports its strategy too, if the catalogue does not distinguish them.
        alike += [other for other in measured if prediction.concerns("upstream", other)]
        confidence = confidence_in(issue, (label, *alike), prediction.verdict, spec, evidence, region, prediction.by)
        condition = "" if region.whole else region.describe()
        problem = otherwise.get(label, "") if prediction.by else ""
        verdict, why, by = prediction.verdict, prediction.why, prediction.by
        effects.append(Effect((label,), verdict, condition, why, confidence, by, problem))
    only_measured = _only_measured(issue, spec, evidence, considered, effects)
    return tuple(_merged([*effects, *(effect for effect in only_measured if effect.blocked_by not in foreign)]))


def _otherwise(
    issue: KnownIssue, spec: StackSpec, strategies: Collection[str], shown: Sequence[Prediction]
) -> dict[str, str]:
    """For strategies under which others stop an issue's suite, the problems predicted where they do not."""
    found: dict[str, dict[str, None]] = {}
    for label, prediction, region in applicable_predictions(without_blockers(issue), spec, sorted(strategies)):
        if label in strategies and not any(prediction is each for each in shown):
            only = "" if region.whole else f" with {region.describe()}"
            found.setdefault(label, {})[f"{prediction.verdict}{only}: {prediction.why}"] = None
    return {label: ", or ".join(texts) for label, texts in found.items()}


def _only_measured(
    issue: KnownIssue, spec: StackSpec, evidence: Evidence, considered: Sequence[str], predicted: Sequence[Effect]
) -> list[Effect]:
    """Problems that a cell with exactly this stack showed and that are not among ``predicted``.

    They are of a variant that the entry does not list, or have a verdict that the catalogue does not predict.
    """
    if not set(issue.packages) <= set(spec.pinned):
        return []
    known = {label for effect in predicted for label in effect.strategies}
    found: dict[str, Effect] = {}
    for cell in measured_here(issue, spec, evidence.cells):
        for (issue_id, subject, label), verdict in cell.verdicts.items():
            wanted = label in considered or kind(label) in considered
            if issue_id != issue.id or subject != "upstream" or not wanted or not verdict.is_problem or label in known:
                continue
            prediction = issue.predict("upstream", label, cell.versions)
            why, by, otherwise = _UNPREDICTED, "", ""
            if prediction is not None and cell.gave((issue_id, subject, label), prediction.verdict, prediction.by):
                verdict, why, by = prediction.verdict, prediction.why, prediction.by
                rest = without_blockers(issue).predict("upstream", label, cell.versions) if by else None
                otherwise = f"{rest.verdict}: {rest.why}" if rest is not None and rest.verdict.is_problem else ""
            # An equal effect is known already, by the name of the variant's strategy.
            if not any(effect.why == why and effect.verdict is verdict for effect in predicted):
                confidence = confidence_in(issue, (label,), verdict, spec, evidence, by=by)
                found.setdefault(label, Effect((label,), verdict, "", why, confidence, by, otherwise))
    return list(found.values())


def _merged(effects: Iterable[Effect]) -> list[Effect]:
    """One effect for all strategies that differ in nothing else."""
    alike: dict[tuple[object, ...], list[Effect]] = {}
    for effect in effects:
        confidence = effect.confidence
        cause = (effect.verdict, effect.blocked_by, effect.otherwise, effect.condition, effect.why)
        key = (*cause, confidence.level, confidence.cells, confidence.cause_predicted)
        alike.setdefault(key, []).append(effect)
    found = []
    for same in alike.values():
        strategies = tuple(label for effect in same for label in effect.strategies)
        # If one of them rests on another strategy's measurement, name that strategy.
        confidence = next((effect.confidence for effect in same if effect.confidence.strategy), same[0].confidence)
        found.append(dataclasses.replace(same[0], strategies=strategies, confidence=confidence))
    return found


def _uncured(issue: KnownIssue, spec: StackSpec, effects: Sequence[Effect]) -> str:
    """Why the corrected trainer is not ``ok`` either under these effects; empty if the catalogue predicts ``ok``."""
    if not issue.cure:
        return ""
    for label in itertools.chain.from_iterable(effect.strategies for effect in effects):
        for prediction, region in regions(issue, "corrected", label, spec.versions).by_prediction():
            if prediction is not None and prediction.verdict is not Verdict.OK and region.whole:
                return f"{prediction.verdict} under {label}: {prediction.why}"
    return ""
