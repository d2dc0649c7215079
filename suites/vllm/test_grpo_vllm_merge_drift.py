"""Known issue ``grpo-vllm-merge-drift`` (trl 6688): a synchronisation changes the policy's own weights.

Right is: the policy is bitwise as it was before, though its adapter was merged for the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.known_issues import load
from pytest_trlcompat.plugin.judging import Judge

from . import verdicts

if TYPE_CHECKING:
    from .trainings import VLLMTrainings

pytestmark = [pytest.mark.known_issue("grpo-vllm-merge-drift"), pytest.mark.vllm]


@pytest.mark.parametrize("label", load()["grpo-vllm-merge-drift"].strategies)
def test_policy(label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    judge(lambda: verdicts.policy(vllm_trainings(subject, label), label), subject=subject, strategy=label)
