"""How a known issue shows with a stack: what is predicted or measured, under which strategies and conditions.

Imports no package of the stack.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from pytest_trlcompat.catalog.evidence import Evidence
from pytest_trlcompat.catalog.issue import KnownIssue, Prediction, kind
from pytest_trlcompat.catalog.regions import regions
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.doctor.applicable import applicable_predictions, without_blockers
from pytest_trlcompat.doctor.confidence import Confidence, confidence_in, measured_here
from pytest_trlcompat.doctor.stack_spec import StackSpec

__all__ = ["Effect", "effects_of", "uncured"]

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


def effects_of(
    issue: KnownIssue, spec: StackSpec, evidence: Evidence, considered: Sequence[str], foreign: Collection[str]
) -> tuple[Effect, ...]:
    """How an issue shows with a stack, the same effect of several strategies once; empty where it does not.

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
        confidence = confidence_in(
            issue, (label, *alike), prediction.verdict, spec, evidence, region, prediction.by, prediction
        )
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
        for label, verdict in cell.problems.get(issue.id, ()):
            if label in known or not (label in considered or kind(label) in considered):
                continue
            if (issue.id, "upstream", label) in cell.fitting:
                continue  # a search that found other known issues there, which are said by themselves
            prediction = issue.predict("upstream", label, cell.versions)
            why, by, otherwise = _UNPREDICTED, "", ""
            if prediction is not None and cell.gave((issue.id, "upstream", label), prediction.verdict, prediction.by):
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


def uncured(issue: KnownIssue, spec: StackSpec, effects: Sequence[Effect]) -> str:
    """Why the corrected trainer is not ``ok`` either under these effects; empty if the catalogue predicts ``ok``."""
    if not issue.cure:
        return ""
    for label in itertools.chain.from_iterable(effect.strategies for effect in effects):
        for prediction, region in regions(issue, "corrected", label, spec.versions, spec.together).by_prediction():
            if prediction is not None and prediction.verdict is not Verdict.OK and region.whole:
                return f"{prediction.verdict} under {label}: {prediction.why}"
    return ""
