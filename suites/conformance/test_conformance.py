"""Known issues ``conformance-grpo`` and so on: a trainer gives other numbers than the reference.

Right is: with a setting, every quantity of a short training that can be seen is the reference's, from the tokens to the
logs; see :mod:`pytest_trlcompat.conformance`. A difference that another known issue predicts is that issue's, and the
verdict ``blocked``. What nothing predicts is a finding, and fails. Each value alone is tried in every sweep, in some of
its cells: see :mod:`pytest_trlcompat.matrix.suite_choice`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.conformance import rows
from pytest_trlcompat.matrix.suite_choice import PARTS
from pytest_trlcompat.plugin.judging import Judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .trainings import ConformanceTrainings

ON_DEMAND = ("ppo",)
"""Trainers whose suite waits until what it finds in every release is in the catalogue."""


def suite_of(trainer: str) -> str:
    """The id of a trainer's suite in the catalogue."""
    return f"conformance-{trainer.replace('_', '-')}"


def marks_of(trainer: str, label: str) -> Sequence[pytest.MarkDecorator]:
    """Rows of the covering array, and those with two ranks, are part of a full sweep; those with Liger or images of
    their own."""
    named = pytest.mark.known_issue(suite_of(trainer))
    if trainer in ON_DEMAND:
        return named, pytest.mark.on_demand
    row = rows.load(trainer)[label]
    if row.added:
        return named, getattr(pytest.mark, row.added)
    part = getattr(pytest.mark, PARTS[rows.number_of_launch(trainer, label) % len(PARTS)])
    alone = row.strategy == "single" and not row.is_of_array
    return (named, part) if alone else (named, part, pytest.mark.every_pair)


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
