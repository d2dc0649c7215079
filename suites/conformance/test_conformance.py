"""Known issues ``conformance-grpo`` and so on: a trainer gives other numbers than the reference.

Right is: with a setting, every quantity of a short training that can be seen is the reference's, from the tokens to the
logs; see :mod:`pytest_trlcompat.conformance`. A difference that another known issue predicts is that issue's, and the
verdict ``blocked``. What nothing predicts is a finding, and fails. Each value is tried in every sweep, in the newest
cell, and each row that shows a known issue in an older one, too: see :mod:`row_choice` and
:mod:`pytest_trlcompat.matrix.suite_choice`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.conformance import rows
from pytest_trlcompat.matrix.suite_choice import NOT_DEFAULT, ONLY_NEWEST, PARTS
from pytest_trlcompat.plugin.judging import Judge

from .row_choice import SHOWN, covering, launch_of

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
    their own. Of the others the default cells try those that :mod:`row_choice` names, and what shows nothing known the
    newest of them alone."""
    named = pytest.mark.known_issue(suite_of(trainer))
    if trainer in ON_DEMAND:
        return named, pytest.mark.on_demand
    row = rows.load(trainer)[label]
    if row.added:
        return named, getattr(pytest.mark, row.added)
    part = getattr(pytest.mark, PARTS[launch_of(trainer, label).number % len(PARTS)])
    is_shown, is_covering = (trainer, label) in SHOWN, label in covering(trainer)
    if row.strategy != "single" or (row.is_of_array and not is_covering):
        return named, part, pytest.mark.every_pair
    if not is_shown and not is_covering:
        return named, part, getattr(pytest.mark, NOT_DEFAULT)
    if is_shown or trainer in ONLY_IN_OLDER:
        return named, part
    return named, part, getattr(pytest.mark, ONLY_NEWEST)


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
