"""What is trained on is what vLLM was asked for and returned, with images too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.plugin.judging import Judge

from . import verdicts
from .trainings import measurements

if TYPE_CHECKING:
    from .trainings import VLLMTrainings

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(("trainer", "label"), measurements("batches", "images"))
def test_batches(trainer: str, label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    """What is trained on is not what vLLM was asked for and returned.

    Right is: over all ranks each group's prompt is asked for ``num_generations`` times in a row, the completions are
    trained on in the order in which they came, the sampler's log-probabilities are those of its tokens at the
    temperature, and the importance ratios are ``exp(sum(policy - sampler))``. With ``images`` (trl 6294): each request
    has the images of its row, in order, and the prompt that the engine makes of it is what the processor makes of that
    row alone.
    """
    judge(
        lambda: verdicts.batches(vllm_trainings(subject, label, trainer), label, trainer),
        subject=subject,
        strategy=label,
    )


@pytest.mark.parametrize(("trainer", "label"), measurements("image-token"))
def test_image_token(trainer: str, label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    """vLLM may sample the token that stands for an image (trl 3847).

    Right is: no completion has a token for which there is no image, of a model either that gives it most of the
    probability.
    """
    issue = judge.issue.id
    judge(
        lambda: verdicts.image_token(vllm_trainings(subject, label, trainer), label, issue, trainer),
        subject=subject,
        strategy=label,
    )
