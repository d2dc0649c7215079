"""Known issue ``deepspeed-mixed-dtypes``: a float32 adapter on a bfloat16 model under ZeRO-3 (deepspeed 8073).

Right is: GRPO trains so as in a single process, see :mod:`suites.settings.equivalence`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.plugin.judging import Judge

from ..settings.table import row

if TYPE_CHECKING:
    from ..settings.trainings import SettingTrainings

pytestmark = pytest.mark.known_issue("deepspeed-mixed-dtypes")

LABEL = "zero3-bf16_weights-peft_config"


def test_training(subject: str, judge: Judge, setting_trainings: SettingTrainings) -> None:
    judge(lambda: setting_trainings.judge(judge.issue.id, subject, row(LABEL)), subject=subject, strategy=LABEL)
