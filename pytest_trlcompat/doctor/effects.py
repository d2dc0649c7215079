"""How a known issue shows with a stack: what is predicted or measured, under which strategies and conditions."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pytest_trlcompat.catalog.issue import KnownIssue, Prediction, kind
from pytest_trlcompat.catalog.measurements import CellSet
from pytest_trlcompat.catalog.ranges import at, parse
from pytest_trlcompat.catalog.regions import Projection, Region
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.doctor.confidence import Confidence, Level
from pytest_trlcompat.doctor.neighbours import Neighbours
from pytest_trlcompat.doctor.stack_spec import ORDER

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
    issue: KnownIssue,
    projection: Projection,
    neighbours: Neighbours,
    considered: Sequence[str],
    foreign: Collection[str],
) -> tuple[Effect, ...]:
    """How an issue shows with a stack, the same effect of several strategies once; empty where it does not.

    Args:
        foreign: ids of the known issues that stop only others: what is predicted without these counts.
    """
    problems = projection.problems(issue, issue.without_blockers(foreign), considered)
    effects = _predicted(issue, problems, projection, neighbours) if problems else []
    only_measured = _only_measured(issue, neighbours, considered, effects)
    return tuple(_merged([*effects, *(effect for effect in only_measured if effect.blocked_by not in foreign)]))


def _predicted(
    issue: KnownIssue,
    problems: Sequence[tuple[str, Prediction, Region]],
    projection: Projection,
    neighbours: Neighbours,
) -> list[Effect]:
    measured = [
        label for label in sorted(neighbours.measured.verdicts(issue.id)) if label not in {f[0] for f in problems}
    ]
    stopped = {label for label, prediction, _ in problems if prediction.by}
    otherwise = _otherwise(issue, projection, stopped, [prediction for _, prediction, _ in problems]) if stopped else {}
    effects = []
    for label, prediction, region in problems:
        alike = [other for other, same, _ in problems if same is prediction and other != label]
        # A measured variant supports its strategy too, if the catalogue does not distinguish them.
        alike += [other for other in measured if prediction.concerns("upstream", other)]
        confidence = _confidence(
            issue, (label, *alike), prediction.verdict, neighbours, region, prediction.by, prediction
        )
        condition = "" if region.whole else region.describe()
        problem = otherwise.get(label, "") if prediction.by else ""
        verdict, why, by = prediction.verdict, prediction.why, prediction.by
        effects.append(Effect((label,), verdict, condition, why, confidence, by, problem))
    return effects


def _otherwise(
    issue: KnownIssue, projection: Projection, strategies: Collection[str], shown: Sequence[Prediction]
) -> dict[str, str]:
    """For strategies under which others stop an issue's suite, the problems predicted where they do not."""
    problems: dict[str, dict[str, None]] = {}
    rest = projection.problems(issue, issue.without_blockers(), sorted(strategies))
    for label, prediction, region in rest:
        if label in strategies and not any(prediction is known for known in shown):
            only = "" if region.whole else f" with {region.describe()}"
            problems.setdefault(label, {})[f"{prediction.verdict}{only}: {prediction.why}"] = None
    return {label: ", or ".join(texts) for label, texts in problems.items()}


def _only_measured(
    issue: KnownIssue, neighbours: Neighbours, considered: Sequence[str], predicted: Sequence[Effect]
) -> list[Effect]:
    """Problems that a cell with exactly this stack showed and that are not among ``predicted``.

    They are of a variant that the entry does not list, or have a verdict that the catalogue does not predict.
    """
    measured = neighbours.measured
    if not neighbours.pinned.keys() >= set(issue.packages):
        return []
    known = {label for effect in predicted for label in effect.strategies}
    here = neighbours.here(issue.packages)
    problems = [
        (label, Verdict(name), shown)
        for label, verdicts in measured.verdicts(issue.id).items()
        if label not in known and (label in considered or kind(label) in considered)
        for name, cells in verdicts.items()
        # Where it fits, a search found other known issues there, which are said by themselves.
        if Verdict(name).is_problem and (shown := cells & here & ~measured.fitting(issue.id, label))
    ]
    effects: dict[str, Effect] = {}
    for number in neighbours.nearest_first(functools.reduce(operator.or_, (cells for *_, cells in problems), 0)):
        for label, verdict, cells in problems:
            if label in effects or not cells >> number & 1:
                continue
            prediction = next(
                (candidate for candidate, those in measured.predicted(issue, label) if those >> number & 1), None
            )
            why, by, otherwise = _UNPREDICTED, "", ""
            if prediction and measured.gave(issue.id, label, prediction.verdict, prediction.by) >> number & 1:
                verdict, why, by = prediction.verdict, prediction.why, prediction.by
                otherwise = _beneath(issue, label, measured.cells[number].versions) if by else ""
            # An equal effect is known already, by the name of the variant's strategy.
            if not any(effect.why == why and effect.verdict is verdict for effect in predicted):
                confidence = _confidence(issue, (label,), verdict, neighbours, by=by)
                effects[label] = Effect((label,), verdict, "", why, confidence, by, otherwise)
    return list(effects.values())


def _beneath(issue: KnownIssue, label: str, versions: Mapping[str, str]) -> str:
    """The problem that is predicted for a cell where no other known issue stops the suite; empty if none is."""
    rest = (prediction for prediction in issue.without_blockers() if prediction.concerns("upstream", label))
    prediction = next((prediction for prediction in rest if _holds(prediction.when, versions)), None)
    return f"{prediction.verdict}: {prediction.why}" if prediction is not None and prediction.verdict.is_problem else ""


def _holds(when: Mapping[str, str], versions: Mapping[str, str]) -> bool:
    """By remembered ranges: one answer of ``packaging``'s costs its import, a tenth of the whole."""
    return all(package in versions and parse(text).covers(at(versions[package])) for package, text in when.items())


def _confidence(
    issue: KnownIssue,
    strategies: Sequence[str],
    verdict: Verdict,
    neighbours: Neighbours,
    region: Region | None = None,
    by: str = "",
    prediction: Prediction | None = None,
) -> Confidence:
    """How well measurements support ``verdict`` for the upstream trainer.

    Args:
        strategies: the requested one, then others for which the catalogue predicts the same; the cells of the first
            that has any are used.
        region: the versions for which the verdict is predicted; a cell outside them does not support it.
        by: if the verdict is ``blocked``, the known issue that is predicted to stop the test; a cell in which another
            issue stops it does not support the verdict.
        prediction: the one that gives the verdict; a cell that has it by another prediction has another reason.
    """
    measured = neighbours.measured
    for label in strategies:
        cells = measured.gave(issue.id, label, verdict, by)
        if cells:
            inside = cells
            if prediction is not None:
                inside &= next(
                    (those for candidate, those in measured.predicted(issue, label) if candidate is prediction), 0
                )
            if region is not None and region.axes:
                inside = sum(
                    1 << number
                    for number in neighbours.nearest_first(inside)
                    if region.holds(measured.cells[number].versions)
                )
            level, numbers, torch = (
                _of_cells(issue, neighbours, inside) if inside else _beyond(issue, neighbours, cells)
            )
            return Confidence(
                level,
                tuple(measured.cells[number].id for number in numbers),
                "" if label == strategies[0] else label,
                torch,
                verdict is Verdict.BLOCKED and not all(measured.attributed >> number & 1 for number in numbers),
            )
    return Confidence(Level.UNMEASURED)


_Support = tuple[Level, tuple[int, ...], str]
"""A level, the numbers of the cells that support a verdict, and their torch if it is not the stack's."""


def _of_cells(issue: KnownIssue, neighbours: Neighbours, cells: CellSet) -> _Support:
    here = cells & neighbours.here(issue.packages)
    if alike := here & neighbours.with_same_torch:
        return Level.MEASURED, (neighbours.nearest(alike),), ""
    if here:
        number = neighbours.nearest(here)
        return Level.OTHER_TORCH, (number,), neighbours.measured.cells[number].versions["torch"]
    deciding = [package for package in ORDER if package in issue.packages and neighbours.is_known(package)]
    if deciding and neighbours.pinned.keys() >= set(deciding):
        pair = neighbours.around(deciding, cells)
        if pair is not None:
            return Level.BETWEEN, pair, _torch_of(issue, neighbours, 1 << pair[0] | 1 << pair[1])
    return _beyond(issue, neighbours, cells)


def _beyond(issue: KnownIssue, neighbours: Neighbours, cells: CellSet) -> _Support:
    number = neighbours.nearest(cells)
    return Level.BEYOND, (number,), _torch_of(issue, neighbours, 1 << number)


def _torch_of(issue: KnownIssue, neighbours: Neighbours, cells: CellSet) -> str:
    """The torch with which some cells were measured, where none has the stack's and no prediction looks at it."""
    if "torch" in issue.packages or cells & neighbours.with_same_torch:
        return ""
    return neighbours.measured.cells[neighbours.nearest(cells)].versions["torch"]


def _merged(effects: Iterable[Effect]) -> list[Effect]:
    """One effect for all strategies that differ in nothing else."""
    alike: dict[tuple[object, ...], list[Effect]] = {}
    for effect in effects:
        confidence = effect.confidence
        cause = (effect.verdict, effect.blocked_by, effect.otherwise, effect.condition, effect.why)
        key = (*cause, confidence.level, confidence.cells, confidence.cause_predicted)
        alike.setdefault(key, []).append(effect)
    merged = []
    for same in alike.values():
        strategies = tuple(label for effect in same for label in effect.strategies)
        # If one of them rests on another strategy's measurement, name that strategy.
        confidence = next((effect.confidence for effect in same if effect.confidence.strategy), same[0].confidence)
        merged.append(dataclasses.replace(same[0], strategies=strategies, confidence=confidence))
    return merged


def uncured(issue: KnownIssue, projection: Projection, effects: Sequence[Effect]) -> str:
    """Why the corrected trainer is not ``ok`` either under these effects; empty if the catalogue predicts ``ok``."""
    if not issue.cure:
        return ""
    for label in itertools.chain.from_iterable(effect.strategies for effect in effects):
        for prediction, region in projection.regions(issue.predictions, "corrected", label).by_prediction():
            if prediction is not None and prediction.verdict is not Verdict.OK and region.whole:
                return f"{prediction.verdict} under {label}: {prediction.why}"
    return ""
