"""Known issue ``conformance-ppo``: PPO gives other numbers than the reference.

Right is: with a setting, every quantity of a short training that can be seen is the reference's, from the tokens to the
logs; see :mod:`pytest_trlcompat.conformance`. A difference that another known issue predicts is that issue's, and the
verdict ``blocked``. What nothing predicts is a finding, and fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.plugin.judging import Judge

if TYPE_CHECKING:
    from .trainings import ConformanceTrainings

# On demand, until what it finds in every release with PPO is in the catalogue.
pytestmark = [pytest.mark.known_issue("conformance-ppo"), pytest.mark.on_demand]

LABELS = known_issues.load()["conformance-ppo"].strategies


@pytest.mark.parametrize("label", LABELS)
def test_setting(label: str, subject: str, judge: Judge, conformance_trainings: ConformanceTrainings) -> None:
    judge(lambda: conformance_trainings.judge(subject, label, "ppo"), subject=subject, strategy=label)
