"""What several suites say about a training that :mod:`grpo_trainings` has measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_trlcompat import _location
from pytest_trlcompat.catalog.known_issues import load
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding

from .in_rank import grpo_trainings
from .measured import every

__all__ = ["LOSS_TOLERANCE", "failure_of", "mean_over_ranks", "of_resuming", "same_at", "unequal"]

LOSS_TOLERANCE = 1e-5
"""Absolute, of a loss of about 0.02 in float32: sums in another order differ by 1e-8, a wrong reduction by 1e-3."""
_GRAD_NORM_TOLERANCE = 1e-4
"""Relative; the norm is a sum over shards in another order."""


def failure_of(issue_id: str, failures: Mapping[str, str]) -> Verdict | None:
    """``broken`` where a stage failed with the issue's symptom, ``error`` where one failed otherwise, else ``None``.

    Args:
        failures: by stage, ``"TypeName: message"``.
    """
    if not failures:
        return None
    issue = load().get_issue(issue_id)
    for text in failures.values():
        error_text, location = _location.apart(text)
        name, _, message = error_text.partition(": ")
        if issue.shows((name,), message, location):
            return Verdict.BROKEN
    return Verdict.ERROR


def mean_over_ranks(ranks: Sequence[Sequence[float]]) -> list[float]:
    """The loss of each step, whose rows are spread over the ranks evenly."""
    return [sum(step) / len(step) for step in zip(*ranks, strict=True)]


def of_resuming(ranks: Sequence[Mapping[str, Any]]) -> Finding:
    """What :func:`grpo_trainings.resumed` shows: ``ok`` where nothing shows that training was interrupted."""
    losses, resumed = (mean_over_ranks([rank[key] for rank in ranks]) for key in ("losses", "losses_resumed"))
    norms, norms_resumed = ranks[0]["grad_norm"], ranks[0]["grad_norm_resumed"]
    evidence = {
        "losses": losses,
        "losses_resumed": resumed,
        "grad_norm": norms,
        "grad_norm_resumed": norms_resumed,
        "steps": ranks[0]["steps"],
    }
    expected = grpo_trainings.RESUMED_STEPS
    assert len(losses) == expected
    wrong = unequal(resumed, losses[1:]) or unequal(norms_resumed, norms, relative=True)
    return Finding(Verdict.SILENT if wrong or ranks[0]["steps"] != expected else Verdict.OK, evidence)


def same_at(losses: Mapping[int, float], expected: Mapping[int, float]) -> bool:
    """Whether there are losses, and each is the expected one of the same step. ``expected`` may have more steps."""
    steps = [step for step in losses if step in expected]
    return bool(steps) and not unequal(list(losses.values()), [expected[step] for step in steps])


def unequal(series: Sequence[float], expected: Sequence[float], relative: bool = False) -> bool:
    """Whether two series differ by more than rounding, in length or in any number; what is not finite equals nothing.

    Raises:
        AssertionError: both are empty, so that there is nothing to compare.
    """
    assert series or expected, "there is nothing to compare"
    limits = [_GRAD_NORM_TOLERANCE * abs(number) if relative else LOSS_TOLERANCE for number in expected]
    return len(series) != len(expected) or not every(
        abs(left - right) <= limit < math.inf for left, right, limit in zip(series, expected, limits, strict=True)
    )
