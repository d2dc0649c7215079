"""Known issues ``grpo-vllm-images`` (trl 6294): vLLM completes other prompts with images than are trained on;
``grpo-vllm-image-token`` (trl 3847): it may sample the token that stands for an image; and
``grpo-vllm-server-logprobs``: what a server answers to prompts with images cannot be read.

Right is: each request has the images of its row, in order; the prompt that the engine makes of it is what the processor
makes of that row alone; what ``grpo-vllm-batches`` says, with these images in the reference; and no completion has a
token for which there is no image, of a model either that gives it most of the probability.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.known_issues import load
from pytest_trlcompat.plugin.judging import Judge

from . import verdicts

if TYPE_CHECKING:
    from .trainings import VLLMTrainings

ISSUE = "grpo-vllm-images"
TOKEN = "grpo-vllm-image-token"
LOGPROBS = "grpo-vllm-server-logprobs"
pytestmark = [pytest.mark.vllm]


@pytest.mark.known_issue("grpo-vllm-images")
@pytest.mark.parametrize("label", load()[ISSUE].strategies)
def test_batches(label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    judge(lambda: verdicts.batches(vllm_trainings(subject, label), label), subject=subject, strategy=label)


@pytest.mark.known_issue("grpo-vllm-image-token")
@pytest.mark.parametrize("label", load()[TOKEN].strategies)
def test_image_token(label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    judge(lambda: verdicts.image_token(vllm_trainings(subject, label), label, TOKEN), subject=subject, strategy=label)


@pytest.mark.known_issue("grpo-vllm-server-logprobs")
@pytest.mark.parametrize("label", load()[LOGPROBS].strategies)
def test_server_logprobs(label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    judge(lambda: verdicts.answers(vllm_trainings(subject, label), label, LOGPROBS), subject=subject, strategy=label)
