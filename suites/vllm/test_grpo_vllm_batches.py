"""Known issue ``grpo-vllm-batches``: what GRPO trains on is not what vLLM was asked for and returned.

Right is: over all ranks each group's prompt is asked for ``num_generations`` times in a row, the completions are
trained on in the order in which they came, the sampler's log-probabilities are those of its tokens at the temperature,
and the importance ratios are ``exp(sum(policy - sampler))``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.known_issues import load
from pytest_trlcompat.plugin.judging import Judge

from . import verdicts

if TYPE_CHECKING:
    from .trainings import VLLMTrainings

pytestmark = [pytest.mark.known_issue("grpo-vllm-batches"), pytest.mark.vllm]


@pytest.mark.parametrize("label", load()["grpo-vllm-batches"].strategies)
def test_batches(label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    judge(lambda: verdicts.batches(vllm_trainings(subject, label), label), subject=subject, strategy=label)
