"""Known issue ``grpo-vllm-sync-memory``: handing weights to vLLM gathers the whole model on each rank.

Right is: a rank of ZeRO-3 or FSDP gathers a small part of the model at a time, as in a forward pass; of a model of
twelve layers, less than half.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.known_issues import load
from pytest_trlcompat.plugin.judging import Judge

from . import verdicts

if TYPE_CHECKING:
    from .trainings import VLLMTrainings

ISSUE = "grpo-vllm-sync-memory"
pytestmark = [pytest.mark.known_issue("grpo-vllm-sync-memory"), pytest.mark.vllm]


@pytest.mark.parametrize("label", load()[ISSUE].strategies)
def test_memory(label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    judge(lambda: verdicts.memory(vllm_trainings(subject, label)), subject=subject, strategy=label)
