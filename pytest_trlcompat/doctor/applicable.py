"""Which known issues affect a stack, by the catalogue alone: what pytest's header shows, and the start of a diagnosis.

Imports no package of the stack and little else, because pytest imports it when it starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from pytest_trlcompat.catalog.existence import absent_strategy, partly_absent_strategies
from pytest_trlcompat.catalog.issue import STRATEGIES, KnownIssue, Prediction, kind
from pytest_trlcompat.catalog.regions import Region, regions
from pytest_trlcompat.doctor.stack_spec import StackSpec

__all__ = [
    "StrategyError",
    "applicable_predictions",
    "considered_strategies",
    "labels",
    "partly_absent",
    "summary",
    "without_blockers",
]

_NEEDED_BY_STRATEGY = {"zero1": "deepspeed", "zero2": "deepspeed", "zero3": "deepspeed"}


class StrategyError(ValueError):
    """A requested strategy is unknown, or cannot run on the stack."""


def considered_strategies(names: Sequence[str], spec: StackSpec, trainer: str = "") -> tuple[tuple[str, ...], str]:
    """The strategies to consider, and a text that names those left out because the stack does not have them.

    Args:
        trainer: the one that is asked about; empty for all.

    Raises:
        StrategyError: for an unknown strategy, or one that cannot run on this stack.
    """
    absent = set(spec.absent)
    impossible = {name: package for name, package in _NEEDED_BY_STRATEGY.items() if package in absent}
    for name in names:
        if kind(name) not in STRATEGIES:
            raise StrategyError(f"unknown strategy {name!r}; known are {', '.join(STRATEGIES)}")
        if kind(name) in impossible:
            raise StrategyError(f"strategy {name} needs {impossible[kind(name)]}, which is not in {spec.source}")
        if (absence := absent_strategy(kind(name), spec.versions, trainer)) is not None:
            raise StrategyError(
                f"strategy {name} is absent with {_named(absence.when, spec)} ({spec.source}): {absence.why}; take "
                f"{absence.instead}, or ask about another strategy"
            )
    if names:
        return tuple(dict.fromkeys(names)), ""
    left_out = [f"{', '.join(impossible)}: deepspeed is not installed"] if impossible else []
    absences = {name: absent_strategy(name, spec.versions, trainer) for name in STRATEGIES}
    left_out += [f"{name}: {absence.why}" for name, absence in absences.items() if absence is not None]
    possible = tuple(name for name in STRATEGIES if name not in impossible and absences[name] is None)
    return possible, "; ".join(left_out)


def partly_absent(names: Sequence[str], spec: StackSpec, trainer: str = "") -> tuple[str, ...]:
    """A sentence for each of the strategies that the stack does not have with some of the versions that it may have."""
    return tuple(
        f"{name} is absent with {_ranges(absence.when)}: {absence.why}; nothing is said about these versions"
        for name in dict.fromkeys(map(kind, names))
        for absence in partly_absent_strategies(name, spec.versions, trainer)
    )


def _ranges(when: Mapping[str, str]) -> str:
    return ", ".join(f"{package} {text}" for package, text in when.items())


def _named(packages: Iterable[str], spec: StackSpec) -> str:
    return ", ".join(f"{package} {spec.texts.get(package, '')}".strip() for package in packages)


def applicable_predictions(
    issue: KnownIssue, spec: StackSpec, considered: Sequence[str]
) -> list[tuple[str, Prediction, Region]]:
    """The strategies under which the catalogue predicts a problem, each with the prediction and its versions."""
    if any(spec.versions[package] is None for package in issue.needs):
        return []
    found = []
    for label in labels(issue, considered):
        for prediction, region in regions(issue, "upstream", label, spec.versions, spec.together).by_prediction():
            if prediction is not None and prediction.verdict.is_problem:
                found.append((label, prediction, region))
    return found


def without_blockers(issue: KnownIssue, blockers: Collection[str] | None = None) -> KnownIssue:
    """The issue without the predictions that some known issues stop its suite; without ``blockers``, any."""

    def stays(prediction: Prediction) -> bool:
        return not prediction.by or (blockers is not None and prediction.by not in blockers)

    if all(map(stays, issue.predictions)):
        return issue
    # The strategies under which it may show are those of the whole entry.
    kept = tuple(filter(stays, issue.predictions))
    return dataclasses.replace(issue, predictions=kept, strategies=issue.labels())


def labels(issue: KnownIssue, considered: Sequence[str]) -> list[str]:
    """The issue's strategies among those considered.

    A strategy without a variant selects all its variants. A variant that the issue does not list selects its strategy.
    """
    known = issue.labels()
    found = [label for label in known if label in considered or kind(label) in considered]
    found += [kind(label) for label in considered if label not in known and kind(label) in known]
    return list(dict.fromkeys(found))


def summary(number: int, unjudged: int = 0, names: str = "", *, measured: bool = True) -> str:
    """``2 known issues affect this stack: a, b; 3 more cannot be judged``.

    Args:
        measured: whether cells have the stack's releases; else that none affects it is predicted.
    """
    if number == 0:
        if measured and not unjudged:
            return "no known issue affects this stack"
        found = "no known issue is predicted to affect this stack"
        return f"{found}, but {unjudged} cannot be judged" if unjudged else found
    found = "1 known issue affects this stack" if number == 1 else f"{number} known issues affect this stack"
    found += f": {names}" if names else ""
    return f"{found}; {unjudged} more cannot be judged" if unjudged else found
