"""Known issue ``grpo-vllm-server-weights``: a vLLM server gets other weights than the policy has.

Right is: as for ``grpo-vllm-weights``, where the engine is a server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.known_issues import load
from pytest_trlcompat.plugin.judging import Judge

from . import verdicts

if TYPE_CHECKING:
    from .trainings import VLLMTrainings

pytestmark = [pytest.mark.known_issue("grpo-vllm-server-weights"), pytest.mark.vllm]


@pytest.mark.parametrize("label", load()["grpo-vllm-server-weights"].strategies)
def test_weights(label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    judge(
        lambda: verdicts.weights(vllm_trainings(subject, label), label, verdicts.SERVER_WEIGHTS),
        subject=subject,
        strategy=label,
    )
