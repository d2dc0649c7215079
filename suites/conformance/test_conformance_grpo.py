"""Known issue ``conformance-grpo``: GRPO gives other numbers than the reference.

Right is: with a setting, every quantity of a short training that can be seen is the reference's, from the tokens to the
logs; see :mod:`pytest_trlcompat.conformance`. A difference that another known issue predicts is that issue's, and the
verdict ``blocked``. What nothing predicts is a finding, and fails. Each value alone is tried in every sweep.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.conformance import rows
from pytest_trlcompat.plugin.judging import Judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .trainings import ConformanceTrainings


def marks_of(label: str) -> Sequence[pytest.MarkDecorator]:
    """Rows of the covering array, and those with two ranks, are part of a full sweep."""
    row = rows.load("grpo")[label]
    return () if row.strategy == "single" and not row.is_of_array else (pytest.mark.every_pair,)


CASES = [
    pytest.param(label, marks=marks_of(label), id=label) for label in known_issues.load()["conformance-grpo"].strategies
]


@pytest.mark.known_issue("conformance-grpo")
@pytest.mark.parametrize("label", CASES)
def test_setting(label: str, subject: str, judge: Judge, conformance_trainings: ConformanceTrainings) -> None:
    judge(lambda: conformance_trainings.judge(subject, label), subject=subject, strategy=label)
