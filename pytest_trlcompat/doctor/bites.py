"""Which known issues bite a stack by the catalogue alone: all that pytest's header needs, and where a diagnosis begins.

Imports no package of the stack, and little else, because pytest's start waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytest_trlcompat.catalog.known_issues import STRATEGIES, KnownIssue, Prediction, kind
from pytest_trlcompat.catalog.regions import Region, regions
from pytest_trlcompat.doctor.given import Given

__all__ = ["StrategyError", "biting", "chosen", "labels"]

_NEEDED_BY_STRATEGY = {"zero1": "deepspeed", "zero2": "deepspeed", "zero3": "deepspeed"}


class StrategyError(ValueError):
    """A strategy that nobody knows was asked for."""


def chosen(names: Sequence[str], given: Given) -> tuple[tuple[str, ...], str]:
    """The strategies to consider, and which are left out for want of a package.

    Raises:
        StrategyError: an unknown one, or one that cannot run on this stack.
    """
    absent = set(given.absent)
    impossible = {name: package for name, package in _NEEDED_BY_STRATEGY.items() if package in absent}
    for name in names:
        if kind(name) not in STRATEGIES:
            raise StrategyError(f"unknown strategy {name!r}; known are {', '.join(STRATEGIES)}")
        if kind(name) in impossible:
            raise StrategyError(f"strategy {name} needs {impossible[kind(name)]}, which is not in {given.source}")
    if names:
        return tuple(dict.fromkeys(names)), ""
    left = f"{', '.join(impossible)}: deepspeed is not installed" if impossible else ""
    return tuple(name for name in STRATEGIES if name not in impossible), left


def biting(issue: KnownIssue, given: Given, considered: Sequence[str]) -> list[tuple[str, Prediction, Region]]:
    """The strategies under which the catalogue says that it bites, by which prediction, and for which versions."""
    if any(package in given.absent for package in issue.needs):
        return []
    found = []
    for label in labels(issue, considered):
        for prediction, region in regions(issue, "upstream", label, given.versions).by_prediction():
            if prediction is not None and prediction.verdict.is_problem:
                found.append((label, prediction, region))
    return found


def labels(issue: KnownIssue, considered: Sequence[str]) -> list[str]:
    """The issue's strategies among those considered.

    A strategy without a variant stands for all its variants; a variant that the issue does not know, for its strategy.
    """
    known = issue.labels()
    found = [label for label in known if label in considered or kind(label) in considered]
    found += [kind(label) for label in considered if label not in known and kind(label) in known]
    return list(dict.fromkeys(found))
