"""Known issues that the conformance suite found: each is one or a few of its settings, and what differs with them.

What is measured, and what shows the issue, stands in the catalogue: ``settings``, ``difference`` and
``symptom``. Strategies with ranks are part of a full sweep; of the others a cell tries its part of the rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.issue import FINDINGS, measured_with
from pytest_trlcompat.conformance import rows
from pytest_trlcompat.matrix.suite_choice import PARTS
from pytest_trlcompat.plugin.judging import Judge

from .row_choice import launch_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_trlcompat.catalog.issue import KnownIssue

    from .trainings import ConformanceTrainings


def marks_of(issue: KnownIssue, label: str) -> Sequence[pytest.MarkDecorator]:
    named = pytest.mark.known_issue(issue.id)
    trainer = measured_with(issue.id)
    if added := rows.load(trainer)[label].added:
        return named, getattr(pytest.mark, added)
    part = getattr(pytest.mark, PARTS[launch_of(trainer, label).number % len(PARTS)])
    return (named, part) if label.startswith("single-") else (named, part, pytest.mark.every_pair)


CASES = [
    pytest.param(label, marks=marks_of(issue, label), id=f"{issue.id}-{label}")
    for issue in known_issues.load().values()
    if issue.suite == FINDINGS
    for label in issue.strategies
]


@pytest.mark.parametrize("label", CASES)
def test_finding(label: str, subject: str, judge: Judge, conformance_trainings: ConformanceTrainings) -> None:
    judge(lambda: conformance_trainings.judge_issue(judge.issue, subject, label), subject=subject, strategy=label)
