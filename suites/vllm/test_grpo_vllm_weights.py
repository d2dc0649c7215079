"""Known issue ``grpo-vllm-weights``: vLLM generates with other weights than the policy has.

Right is: whenever the engine is asked, each of its tensors is the policy's in the engine's dtype, adapters merged; and
each synchronisation brings each of the policy's parameters exactly once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.known_issues import load
from pytest_trlcompat.plugin.judging import Judge

from . import verdicts

if TYPE_CHECKING:
    from .trainings import VLLMTrainings

pytestmark = [pytest.mark.known_issue("grpo-vllm-weights"), pytest.mark.vllm]


@pytest.mark.parametrize("label", load()["grpo-vllm-weights"].strategies)
def test_weights(label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    judge(lambda: verdicts.weights(vllm_trainings(subject, label), label), subject=subject, strategy=label)
