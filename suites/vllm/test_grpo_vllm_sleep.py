"""Known issue ``grpo-vllm-sleep`` (trl 5312): an engine that slept generates with the checkpoint's weights.

Right is: as for ``grpo-vllm-weights``, where the engine releases its memory between generations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.known_issues import load
from pytest_trlcompat.plugin.judging import Judge

from . import verdicts

if TYPE_CHECKING:
    from .trainings import VLLMTrainings

ISSUE = "grpo-vllm-sleep"
pytestmark = [pytest.mark.known_issue("grpo-vllm-sleep"), pytest.mark.vllm]


@pytest.mark.parametrize("label", load()[ISSUE].strategies)
def test_weights(label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    judge(lambda: verdicts.weights(vllm_trainings(subject, label), label, ISSUE), subject=subject, strategy=label)
