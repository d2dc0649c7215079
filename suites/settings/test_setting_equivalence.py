"""Known issue ``setting-equivalence``: GRPO with a setting is the training that it is in a single process without.

Right is: two steps of SGD give the same losses, logs and movements of every weight as one process with the same model,
precision and adapter, where nothing is recomputed, moved to the host or sharded; for tolerances and their reasons see
:mod:`equivalence`, for the rows :mod:`table`. This catches silent bugs that nobody has named.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.matrix.suite_choice import ONLY_NEWEST
from pytest_trlcompat.plugin.judging import Finding, Judge, Untestable

from .table import FEW, row

if TYPE_CHECKING:
    from .trainings import SettingTrainings

pytestmark = pytest.mark.known_issue("setting-equivalence")


def marks_of(label: str) -> Sequence[pytest.MarkDecorator]:
    if row(label).values["compile"]:
        return (pytest.mark.on_demand,)
    return (getattr(pytest.mark, ONLY_NEWEST),) if label in FEW else (pytest.mark.every_pair,)


ROWS = known_issues.load()["setting-equivalence"].strategies


@pytest.mark.parametrize("label", [pytest.param(label, marks=marks_of(label)) for label in ROWS])
def test_setting(label: str, subject: str, judge: Judge, setting_trainings: SettingTrainings) -> None:
    def measure() -> Finding:
        if "qlora" in row(label).values.values() and importlib.util.find_spec("bitsandbytes") is None:
            raise Untestable("QLoRA needs bitsandbytes, which is not part of this stack")
        return setting_trainings.judge(judge.issue.id, subject, row(label))

    judge(measure, subject=subject, strategy=label)
