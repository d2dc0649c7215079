"""What is trained on is what vLLM was asked for and returned, with images too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.known_issues import load
from pytest_trlcompat.plugin.judging import Judge

from . import verdicts

if TYPE_CHECKING:
    from .trainings import VLLMTrainings

pytestmark = pytest.mark.vllm


@pytest.mark.known_issue("grpo-vllm-batches")
@pytest.mark.parametrize("label", load()["grpo-vllm-batches"].strategies)
def test_batches(label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    """What GRPO trains on is not what vLLM was asked for and returned.

    Right is: over all ranks each group's prompt is asked for ``num_generations`` times in a row, the completions are
    trained on in the order in which they came, the sampler's log-probabilities are those of its tokens at the
    temperature, and the importance ratios are ``exp(sum(policy - sampler))``.
    """
    judge(lambda: verdicts.batches(vllm_trainings(subject, label), label), subject=subject, strategy=label)


@pytest.mark.known_issue("grpo-vllm-images")
@pytest.mark.parametrize("label", load()["grpo-vllm-images"].strategies)
def test_images(label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    """vLLM completes other prompts with images than are trained on (trl 6294).

    Right is: each request has the images of its row, in order; the prompt that the engine makes of it is what the
    processor makes of that row alone; and what ``grpo-vllm-batches`` says, with these images in the reference.
    """
    judge(lambda: verdicts.batches(vllm_trainings(subject, label), label), subject=subject, strategy=label)


@pytest.mark.known_issue("grpo-vllm-image-token")
@pytest.mark.parametrize("label", load()["grpo-vllm-image-token"].strategies)
def test_image_token(label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    """vLLM may sample the token that stands for an image (trl 3847).

    Right is: no completion has a token for which there is no image, of a model either that gives it most of the
    probability.
    """
    issue = judge.issue.id
    judge(lambda: verdicts.image_token(vllm_trainings(subject, label), label, issue), subject=subject, strategy=label)
