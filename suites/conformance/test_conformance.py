"""Known issues ``conformance-grpo`` and so on: a trainer gives other numbers than the reference.

Right is: with a setting, every quantity of a short training that can be seen is the reference's, from the tokens to the
logs; see :mod:`pytest_trlcompat.conformance`. A difference that another known issue predicts is that issue's, and the
verdict ``blocked``. What nothing predicts is a finding, and fails. Each value alone is tried in every sweep, in the
newest cell, and, where a known issue is one of its differences, in an older one: see
:mod:`pytest_trlcompat.matrix.suite_choice`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.issue import FINDINGS, measured_with
from pytest_trlcompat.conformance import rows
from pytest_trlcompat.matrix.suite_choice import ONLY_NEWEST, PARTS
from pytest_trlcompat.plugin.judging import Judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .trainings import ConformanceTrainings

ON_DEMAND = ("ppo",)
"""Trainers whose suite waits until what it finds in every release is in the catalogue."""

ONLY_IN_OLDER = ("first_rloo",)
"""Trainers that the newest release of TRL does not have."""


def suite_of(trainer: str) -> str:
    """The id of a trainer's suite in the catalogue."""
    return f"conformance-{trainer.replace('_', '-')}"


def marks_of(trainer: str, label: str) -> Sequence[pytest.MarkDecorator]:
    """Rows of the covering array, and those with two ranks, are part of a full sweep; those with Liger or images of
    their own; and those that show nothing known are tried with the newest release."""
    named = pytest.mark.known_issue(suite_of(trainer))
    if trainer in ON_DEMAND:
        return named, pytest.mark.on_demand
    row = rows.load(trainer)[label]
    if row.added:
        return named, getattr(pytest.mark, row.added)
    part = getattr(pytest.mark, PARTS[rows.number_of_launch(trainer, label) % len(PARTS)])
    alone = row.strategy == "single" and not row.is_of_array
    if not alone:
        return named, part, pytest.mark.every_pair
    if (trainer, label) in SHOWN or trainer in ONLY_IN_OLDER:
        return named, part
    return named, part, getattr(pytest.mark, ONLY_NEWEST)


SHOWN = {
    (measured_with(issue.id), label)
    for issue in known_issues.load().values()
    if issue.suite == FINDINGS
    for label in issue.strategies
}
"""Rows that show a known issue, by trainer and label."""


CASES = [
    pytest.param(trainer, label, marks=marks_of(trainer, label), id=f"{trainer}-{label}")
    for trainer in rows.TRAINERS
    for label in known_issues.load()[suite_of(trainer)].strategies
]


@pytest.mark.parametrize("trainer, label", CASES)
def test_setting(
    trainer: str, label: str, subject: str, judge: Judge, conformance_trainings: ConformanceTrainings
) -> None:
    judge(lambda: conformance_trainings.judge(subject, label, trainer), subject=subject, strategy=label)
