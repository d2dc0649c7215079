"""The diagnosis of a stack: which known issues affect it, under which strategies, and which pins are ``ok``.

Imports no package of the stack.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_trlcompat.catalog import remedies
from pytest_trlcompat.catalog.evidence import Evidence, MeasuredCell
from pytest_trlcompat.catalog.known_issues import Catalog, KnownIssue, kind
from pytest_trlcompat.catalog.ranges import Range, at
from pytest_trlcompat.catalog.regions import regions
from pytest_trlcompat.catalog.verdict import SEVERITY, Verdict
from pytest_trlcompat.doctor.applicable import applicable_predictions, considered_strategies, labels
from pytest_trlcompat.doctor.confidence import Confidence, confidence_in, distance, measured_here
from pytest_trlcompat.doctor.stack_spec import StackSpec
from pytest_trlcompat.doctor.torch import other_torch

__all__ = ["ApplicableIssue", "Diagnosis", "Effect", "Pins", "diagnose"]

_UNPREDICTED = "measured, though the catalogue predicts another verdict"


@dataclass(frozen=True)
class Effect:
    """How an issue shows under some strategies.

    Attributes:
        condition: versions, of packages whose version is not known, to which this is limited; empty if to none.
        why: the mechanism, from the catalogue.
        blocked_by: the known issue that stops this one's suite first, if the verdict is ``blocked``; else empty.
    """

    strategies: tuple[str, ...]
    verdict: Verdict
    condition: str
    why: str
    confidence: Confidence
    blocked_by: str = ""


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
    def strategies(self) -> tuple[str, ...]:
        """Those under which it has an effect."""
        return tuple(label for effect in self.effects for label in effect.strategies)


@dataclass(frozen=True)
class Pins:
    """A measured cell in which no known issue but ``issues`` shows under ``strategies``."""

    cell: MeasuredCell
    strategies: tuple[str, ...]
    issues: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """The answer for one stack.

    Attributes:
        strategies: those that were considered.
        issues: those that affect the stack, the worst first.
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

    def hidden_by(self, applicable: ApplicableIssue) -> tuple[str, ...]:
        """The known issues that stop the suite of this one wherever it applies; empty if it may be seen somewhere.

        Each of them affects the stack itself, unconditionally and under the same strategies, so that the name of what
        it hides is enough.
        """
        stopped = {(effect.blocked_by, kind(label)) for effect in applicable.effects for label in effect.strategies}
        seen = {
            (other.issue.id, kind(label))
            for other in self.issues
            for effect in other.effects
            if not effect.blocked_by and not effect.condition
            for label in effect.strategies
        }
        return tuple(sorted({by for by, _ in stopped})) if stopped <= seen else ()

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
            "issues": [_issue_to_dict(applicable) for applicable in self.issues],
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


def _issue_to_dict(applicable: ApplicableIssue) -> dict[str, Any]:
    issue = applicable.issue
    return {
        "id": issue.id,
        "title": issue.title,
        "wrong": issue.wrong,
        "symptoms": [{"type": symptom.type_name, "text": symptom.pattern.pattern} for symptom in issue.symptoms],
        "remedy": remedies.remedy(issue, applicable.strategies),
        "cure": issue.cure,
        "mixins": list(remedies.mixins(issue)),
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
                "confidence": effect.confidence.level.value,
                "cells": list(effect.confidence.cells),
                "measured_under": effect.confidence.strategy,
                "measured_with_torch": effect.confidence.torch,
            }
            for effect in applicable.effects
        ],
    }


def diagnose(spec: StackSpec, catalog: Catalog, evidence: Evidence, strategies: Sequence[str] = ()) -> Diagnosis:
    """Which known issues affect a stack, by the catalogue and the evidence.

    Raises:
        StrategyError: see :func:`~pytest_trlcompat.doctor.applicable.considered_strategies`.
    """
    considered, left_out = considered_strategies(strategies, spec)
    issues: list[ApplicableIssue] = []
    clear: list[str] = []
    for issue in catalog.values():
        effects = _effects(issue, spec, evidence, considered)
        if effects:
            issues.append(ApplicableIssue(issue, effects, _uncured(issue, spec, effects)))
        else:
            clear.append(issue.id)
    issues.sort(key=lambda each: min(SEVERITY.index(effect.verdict) for effect in each.effects))
    cells = sorted(evidence.cells, key=distance(spec))
    pins = _ok_pins(spec, cells, catalog, considered) if issues else ()
    ok_for_all = any(each.strategies == considered for each in pins)
    return Diagnosis(
        spec=spec,
        strategies=considered,
        issues=tuple(issues),
        clear=tuple(clear),
        unpredicted=tuple(name for name in clear if not _is_predicted(catalog[name], spec, considered)),
        nearest=cells[0] if cells else None,
        pins=pins,
        fewest=None if ok_for_all else _fewest_issues(cells, catalog, considered, len(issues)),
        measured=evidence.date,
        torch=other_torch(spec, evidence.torches) or _torch_of_same_pins(spec, cells),
        left_out=left_out,
    )


def _torch_of_same_pins(spec: StackSpec, cells: Sequence[MeasuredCell]) -> str:
    """How the stack's torch differs from those with which its TRL and Transformers were measured; may be empty."""
    pins = {package: spec.pinned.get(package) for package in ("trl", "transformers")}
    if None in pins.values():
        return ""
    same = [cell for cell in cells if all(_is_at(cell, package, spec.versions[package]) for package in pins)]
    differs = other_torch(spec, [cell.versions["torch"] for cell in same if "torch" in cell.versions])
    return differs and f"{' with '.join(f'{package} {version}' for package, version in pins.items())}: {differs}"


def _is_predicted(issue: KnownIssue, spec: StackSpec, considered: Sequence[str]) -> bool:
    """Whether the catalogue predicts a verdict for this stack, for any version of the packages not known."""
    relevant = labels(issue, considered)
    found = [regions(issue, "upstream", label, spec.versions).predicted.values() for label in relevant]
    return not relevant or any(prediction is not None for predicted in found for prediction in predicted)


def _effects(issue: KnownIssue, spec: StackSpec, evidence: Evidence, considered: Sequence[str]) -> tuple[Effect, ...]:
    found = applicable_predictions(issue, spec, considered)
    measured = [label for label in evidence.strategies(issue.id) if label not in (each[0] for each in found)]
    effects = []
    for label, prediction, region in found:
        alike = [other for other, same, _ in found if same is prediction and other != label]
        # A measured variant supports its strategy too, if the catalogue does not distinguish them.
        alike += [other for other in measured if prediction.concerns("upstream", other)]
        confidence = confidence_in(issue, (label, *alike), prediction.verdict, spec, evidence, region)
        condition = "" if region.whole else region.describe()
        effects.append(Effect((label,), prediction.verdict, condition, prediction.why, confidence, prediction.by))
    return tuple(_merged([*effects, *_only_measured(issue, spec, evidence, considered, effects)]))


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
            why, by = _UNPREDICTED, ""
            if prediction is not None and cell.gave((issue_id, subject, label), prediction.verdict):
                verdict, why, by = prediction.verdict, prediction.why, prediction.by
            # An equal effect is known already, by the name of the variant's strategy.
            if not any(effect.why == why and effect.verdict is verdict for effect in predicted):
                confidence = confidence_in(issue, (label,), verdict, spec, evidence)
                found.setdefault(label, Effect((label,), verdict, "", why, confidence, by))
    return list(found.values())


def _merged(effects: Iterable[Effect]) -> list[Effect]:
    """One effect for all strategies that differ in nothing else."""
    alike: dict[tuple[object, ...], list[Effect]] = {}
    for effect in effects:
        confidence = effect.confidence
        key = (effect.verdict, effect.blocked_by, effect.condition, effect.why, confidence.level, confidence.cells)
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


def _ok_pins(
    spec: StackSpec, cells: Sequence[MeasuredCell], catalog: Catalog, considered: Sequence[str]
) -> tuple[Pins, ...]:
    """The nearest cell that is ``ok`` for all strategies, after one with the stack's own trl that is so for most.

    If no cell is ``ok`` for all and none has this trl, the one for most may have any trl.
    """
    found = []
    every = next((cell for cell in cells if _is_ok(cell, catalog, considered)), None)
    if every is None or not _has_same_trl(spec, every):
        kept = [cell for cell in cells if _has_same_trl(spec, cell)] or (cells if every is None else [])
        fine = [(cell, tuple(name for name in considered if _is_ok(cell, catalog, (name,)))) for cell in kept]
        best = max(fine, key=lambda each: len(each[1]), default=None)  # the nearest of those with the most
        if best is not None and best[1]:
            found.append(Pins(*best))
    return tuple(found) if every is None else (*found, Pins(every, tuple(considered)))


def _has_same_trl(spec: StackSpec, cell: MeasuredCell) -> bool:
    """Whether a cell has the stack's trl."""
    return _is_at(cell, "trl", spec.versions.get("trl"))


def _is_at(cell: MeasuredCell, package: str, wanted: Range | None) -> bool:
    text = cell.versions.get(package)
    return wanted is not None and text is not None and wanted.covers(at(text))


def _fewest_issues(
    cells: Sequence[MeasuredCell], catalog: Catalog, considered: Sequence[str], fewer_than: int
) -> Pins | None:
    """The nearest of the cells with the fewest issues under all strategies, if these are fewer than so many."""
    best = None
    for cell in cells:
        found = _shown(cell, catalog, considered, fewer_than - 1)
        if found is not None:
            best, fewer_than = Pins(cell, tuple(considered), found), len(found)
    return best


def _is_ok(cell: MeasuredCell, catalog: Catalog, considered: Sequence[str]) -> bool:
    """Whether a cell shows no issue, and has every strategy."""
    return _shown(cell, catalog, considered, 0) is not None


def _shown(cell: MeasuredCell, catalog: Catalog, considered: Sequence[str], limit: int) -> tuple[str, ...] | None:
    """Ids of the issues that a cell shows, by its verdicts, and by the catalogue where it has none.

    ``None`` for more than ``limit`` of them, where something could not be tested, and where no verdict under a strategy
    is ``ok``: such a cell may not have that strategy, or the trainer.
    """
    measured: dict[str, dict[str, Verdict]] = {}
    for (name, subject, label), verdict in cell.verdicts.items():
        if subject == "upstream" and name in catalog and (label in considered or kind(label) in considered):
            measured.setdefault(name, {})[label] = verdict
    by_strategy: dict[str, list[Verdict]] = {}
    for verdicts in measured.values():
        for label, verdict in verdicts.items():
            by_strategy.setdefault(kind(label), []).append(verdict)
    if any(Verdict.UNTESTABLE in verdicts or Verdict.OK not in verdicts for verdicts in by_strategy.values()):
        return None
    shown = {name for name, verdicts in measured.items() if any(verdict.is_problem for verdict in verdicts.values())}
    for issue in catalog.values():
        if len(shown) > limit:
            return None
        unmeasured = {*labels(issue, considered)} - measured.get(issue.id, {}).keys()
        predicted = (issue.predict("upstream", label, cell.versions) for label in unmeasured)
        if issue.id not in shown and any(each is not None and each.verdict.is_problem for each in predicted):
            shown.add(issue.id)
    return tuple(name for name in catalog if name in shown) if len(shown) <= limit else None
