"""Known issue ``grpo-vllm-images`` (trl 6294): vLLM completes other prompts with images than are trained on.

Right is: each request has the images of its row, in order; the prompt that the engine makes of it is what the processor
makes of that row alone; and what ``grpo-vllm-batches`` says, with these images in the reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.known_issues import load
from pytest_trlcompat.plugin.judging import Judge

from . import judging

if TYPE_CHECKING:
    from .trainings import VLLMTrainings

ISSUE = "grpo-vllm-images"
pytestmark = [pytest.mark.known_issue("grpo-vllm-images"), pytest.mark.vllm]


@pytest.mark.parametrize("label", load()[ISSUE].strategies)
def test_batches(label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    judge(lambda: judging.batches(vllm_trainings(subject, label), label), subject=subject, strategy=label)
