"""The diagnosis of a stack: what bites, under which strategies and conditions, how sure, and which pins are ``ok``.

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
from pytest_trlcompat.doctor.bites import biting, chosen, labels
from pytest_trlcompat.doctor.given import Given
from pytest_trlcompat.doctor.sureness import Sureness, distance, how_sure, measured_here
from pytest_trlcompat.doctor.torch import other_torch

__all__ = ["Bite", "Diagnosis", "Finding", "Pins", "diagnose"]

_UNPREDICTED = "measured so, though the catalogue predicts otherwise"


@dataclass(frozen=True)
class Bite:
    """How an issue shows under some strategies.

    Attributes:
        condition: versions of packages that are not settled, with which alone it shows; empty: it does.
        why: what the catalogue gives as the mechanism.
        by: of ``blocked`` the known issue that stops it first; else empty.
    """

    strategies: tuple[str, ...]
    verdict: Verdict
    condition: str
    why: str
    sure: Sureness
    by: str = ""


@dataclass(frozen=True)
class Finding:
    """A known issue that bites.

    Attributes:
        uncured: why the corrected trainer is not ``ok`` either, empty where it is.
    """

    issue: KnownIssue
    bites: tuple[Bite, ...]
    uncured: str = ""

    @property
    def strategies(self) -> tuple[str, ...]:
        return tuple(label for bite in self.bites for label in bite.strategies)


@dataclass(frozen=True)
class Pins:
    """A measured cell in which no known issue bites under ``strategies``."""

    cell: MeasuredCell
    strategies: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """The answer.

    Attributes:
        strategies: that were considered.
        clear: ids of the issues that do not bite.
        untold: ids of those of them of which the catalogue says nothing for this stack.
        nearest: the measured cell that is nearest to the stack.
        pins: nearest measured cells that are ``ok``: with the stack's own trl for some strategies, and for all.
        measured: the day of the sweep that the evidence is from.
        torch: how the stack's torch differs from those that were measured, or that its TRL and Transformers were
            measured with; empty where one of its minor release was.
        left_out: strategies that were not considered, and why.
    """

    given: Given
    strategies: tuple[str, ...]
    findings: tuple[Finding, ...]
    clear: tuple[str, ...]
    untold: tuple[str, ...] = ()
    nearest: MeasuredCell | None = None
    pins: tuple[Pins, ...] = ()
    measured: str = ""
    torch: str = ""
    left_out: str = ""

    def hidden_by(self, finding: Finding) -> tuple[str, ...]:
        """The known issues that stop this one under all strategies where it shows; empty where one may not.

        Each is a finding itself, unconditionally and under the same strategies: what it hides then needs no more than
        its name.
        """
        stopped = {(bite.by, kind(label)) for bite in finding.bites for label in bite.strategies}
        shown = {
            (other.issue.id, kind(label))
            for other in self.findings
            for bite in other.bites
            if not bite.by and not bite.condition
            for label in bite.strategies
        }
        return tuple(sorted({by for by, _ in stopped})) if stopped <= shown else ()

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "schema": 1,
            "source": self.given.source,
            "stack": dict(self.given.texts),
            "unknown": self.given.unknown,
            "absent": self.given.absent,
            "notes": list(self.given.notes),
            "strategies": list(self.strategies),
            "left_out": self.left_out,
            "measured": self.measured,
            "torch": self.torch,
            "bites": [_finding_to_dict(finding) for finding in self.findings],
            "clear": list(self.clear),
            "untold": list(self.untold),
            "nearest": self.nearest.id if self.nearest else None,
            "ok_pins": [
                {"cell": pins.cell.id, "versions": dict(pins.cell.versions), "strategies": list(pins.strategies)}
                for pins in self.pins
            ],
        }


def _finding_to_dict(finding: Finding) -> dict[str, Any]:
    issue = finding.issue
    return {
        "id": issue.id,
        "title": issue.title,
        "wrong": issue.wrong,
        "symptoms": [{"type": symptom.type_name, "text": symptom.pattern.pattern} for symptom in issue.symptoms],
        "remedy": remedies.remedy(issue, finding.strategies),
        "cure": issue.cure,
        "mixins": list(remedies.mixins(issue)),
        "cured_in": remedies.cured_in(issue),
        "uncured": finding.uncured,
        "upstream": list(issue.upstream),
        "suite": issue.suite,
        "when": [
            {
                "strategies": list(bite.strategies),
                "verdict": bite.verdict.value,
                "condition": bite.condition,
                "why": bite.why,
                **({"blocked_by": bite.by} if bite.by else {}),
                "sure": bite.sure.level.value,
                "cells": list(bite.sure.cells),
                "measured_under": bite.sure.strategy,
                "measured_with_torch": bite.sure.torch,
            }
            for bite in finding.bites
        ],
    }


def diagnose(given: Given, catalog: Catalog, evidence: Evidence, strategies: Sequence[str] = ()) -> Diagnosis:
    """Hold a stack against the catalogue and the evidence; the worst finding comes first.

    Raises:
        StrategyError: as :func:`~pytest_trlcompat.doctor.bites.chosen`.
    """
    considered, left_out = chosen(strategies, given)
    findings: list[Finding] = []
    clear: list[str] = []
    for issue in catalog.values():
        bites = _bites(issue, given, evidence, considered)
        if bites:
            findings.append(Finding(issue, bites, _uncured(issue, given, bites)))
        else:
            clear.append(issue.id)
    findings.sort(key=lambda finding: min(SEVERITY.index(bite.verdict) for bite in finding.bites))
    cells = sorted(evidence.cells, key=distance(given))
    return Diagnosis(
        given=given,
        strategies=considered,
        findings=tuple(findings),
        clear=tuple(clear),
        untold=tuple(name for name in clear if not _told(catalog[name], given, considered)),
        nearest=cells[0] if cells else None,
        pins=_ok_pins(given, cells, catalog, considered) if findings else (),
        measured=evidence.date,
        torch=other_torch(given, evidence.torches) or _torch_of_these_pins(given, cells),
        left_out=left_out,
    )


def _torch_of_these_pins(given: Given, cells: Sequence[MeasuredCell]) -> str:
    """How the stack's torch differs from those with which its TRL and Transformers were measured; else empty."""
    pins = {package: given.pinned.get(package) for package in ("trl", "transformers")}
    if None in pins.values():
        return ""
    same = [cell for cell in cells if all(_is_at(cell, package, given.versions[package]) for package in pins)]
    differs = other_torch(given, [cell.versions["torch"] for cell in same if "torch" in cell.versions])
    return differs and f"{' with '.join(f'{package} {version}' for package, version in pins.items())}: {differs}"


def _told(issue: KnownIssue, given: Given, considered: Sequence[str]) -> bool:
    """Whether the catalogue says anything of an issue for this stack, wherever its unknown packages stand."""
    asked = labels(issue, considered)
    found = [regions(issue, "upstream", label, given.versions).predicted.values() for label in asked]
    return not asked or any(prediction is not None for predicted in found for prediction in predicted)


def _bites(issue: KnownIssue, given: Given, evidence: Evidence, considered: Sequence[str]) -> tuple[Bite, ...]:
    found = biting(issue, given, considered)
    measured = [label for label in evidence.strategies(issue.id) if label not in (each[0] for each in found)]
    bites = []
    for label, prediction, region in found:
        alike = [other for other, same, _ in found if same is prediction and other != label]
        # A measured variant tells of its strategy, too, where the catalogue does not tell them apart.
        alike += [other for other in measured if prediction.concerns("upstream", other)]
        sure = how_sure(issue, (label, *alike), prediction.verdict, given, evidence, region)
        condition = "" if region.whole else region.describe()
        bites.append(Bite((label,), prediction.verdict, condition, prediction.why, sure, prediction.by))
    return tuple(_together([*bites, *_also_measured(issue, given, evidence, considered, bites)]))


def _also_measured(
    issue: KnownIssue, given: Given, evidence: Evidence, considered: Sequence[str], told: Sequence[Bite]
) -> list[Bite]:
    """What bites in a cell of just this stack and is not told yet.

    That is a variant which the entry does not list, or a verdict that the catalogue does not predict.
    """
    if not set(issue.packages) <= set(given.pinned):
        return []
    known = {label for bite in told for label in bite.strategies}
    found: dict[str, Bite] = {}
    for cell in measured_here(issue, given, evidence.cells):
        for (issue_id, subject, label), verdict in cell.verdicts.items():
            wanted = label in considered or kind(label) in considered
            if issue_id != issue.id or subject != "upstream" or not wanted or not verdict.is_problem or label in known:
                continue
            prediction = issue.predict("upstream", label, cell.versions)
            why, by = _UNPREDICTED, ""
            if prediction is not None and cell.gave((issue_id, subject, label), prediction.verdict):
                verdict, why, by = prediction.verdict, prediction.why, prediction.by
            if not any(bite.why == why and bite.verdict is verdict for bite in told):  # else its strategy is told of
                sure = how_sure(issue, (label,), verdict, given, evidence)
                found.setdefault(label, Bite((label,), verdict, "", why, sure, by))
    return list(found.values())


def _together(bites: Iterable[Bite]) -> list[Bite]:
    """One entry for strategies of which the same is to be said."""
    alike: dict[tuple[object, ...], list[Bite]] = {}
    for bite in bites:
        key = (bite.verdict, bite.by, bite.condition, bite.why, bite.sure.level, bite.sure.cells)
        alike.setdefault(key, []).append(bite)
    found = []
    for same in alike.values():
        strategies = tuple(label for bite in same for label in bite.strategies)
        # Where some of them borrow another one's measurement, say whose.
        sure = next((bite.sure for bite in same if bite.sure.strategy), same[0].sure)
        found.append(dataclasses.replace(same[0], strategies=strategies, sure=sure))
    return found


def _uncured(issue: KnownIssue, given: Given, bites: Sequence[Bite]) -> str:
    """Why the corrected trainer is not ``ok`` where the issue bites, if the catalogue says so."""
    if not issue.cure:
        return ""
    for label in itertools.chain.from_iterable(bite.strategies for bite in bites):
        for prediction, region in regions(issue, "corrected", label, given.versions).by_prediction():
            if prediction is not None and prediction.verdict is not Verdict.OK and region.whole:
                return f"{prediction.verdict} under {label}: {prediction.why}"
    return ""


def _ok_pins(
    given: Given, cells: Sequence[MeasuredCell], catalog: Catalog, considered: Sequence[str]
) -> tuple[Pins, ...]:
    """The first of ``cells`` for all strategies, and before it one with the stack's own trl for most of them.

    Where no cell is ``ok`` for all, and none has this trl, any cell may be the one for most.
    """
    found = []
    every = next((cell for cell in cells if _is_ok(cell, catalog, considered)), None)
    if every is None or not _stands_at(given, every):
        kept = [cell for cell in cells if _stands_at(given, cell)] or (cells if every is None else [])
        fine = [(cell, tuple(name for name in considered if _is_ok(cell, catalog, (name,)))) for cell in kept]
        best = max(fine, key=lambda each: len(each[1]), default=None)  # the nearest of those with the most
        if best is not None and best[1]:
            found.append(Pins(*best))
    return tuple(found) if every is None else (*found, Pins(every, tuple(considered)))


def _stands_at(given: Given, cell: MeasuredCell) -> bool:
    """Whether a cell has the stack's trl."""
    return _is_at(cell, "trl", given.versions.get("trl"))


def _is_at(cell: MeasuredCell, package: str, wanted: Range | None) -> bool:
    text = cell.versions.get(package)
    return wanted is not None and text is not None and wanted.covers(at(text))


def _is_ok(cell: MeasuredCell, catalog: Catalog, considered: Sequence[str]) -> bool:
    """Whether no issue bites in a cell: by its verdicts, and by the catalogue for what it was not asked.

    Where all verdicts under a strategy are ``absent``, that cell does not have the strategy (or the trainer).
    """
    found: dict[str, list[Verdict]] = {}
    for issue in catalog.values():
        for label in {*labels(issue, considered), *_asked(cell, issue, considered)}:
            verdict = cell.verdicts.get((issue.id, "upstream", label))
            if verdict is Verdict.UNTESTABLE:  # nobody knows
                return False
            if verdict is not None:
                found.setdefault(kind(label), []).append(verdict)
            predicted = issue.predict("upstream", label, cell.versions)
            if (verdict or (predicted and predicted.verdict) or Verdict.OK).is_problem:
                return False
    return all(any(verdict is Verdict.OK for verdict in verdicts) for verdicts in found.values())


def _asked(cell: MeasuredCell, issue: KnownIssue, considered: Sequence[str]) -> list[str]:
    """The strategies, among those considered, of a cell's verdicts on an issue."""
    return [
        label
        for name, subject, label in cell.verdicts
        if name == issue.id and subject == "upstream" and (label in considered or kind(label) in considered)
    ]
