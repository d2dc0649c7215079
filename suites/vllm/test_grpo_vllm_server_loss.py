"""Known issue ``grpo-vllm-server-loss``: a training goes on after its vLLM server was lost.

Right is: where the server has ended, or was restarted, every rank ends with an error, and no completion comes from
other weights than the policy's. Part of a sweep with ``--issue`` alone: each training costs a server, and a minute in
which TRL's client asks again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.known_issues import load
from pytest_trlcompat.plugin.judging import Judge

from . import judging

if TYPE_CHECKING:
    from .trainings import VLLMTrainings

pytestmark = [pytest.mark.known_issue("grpo-vllm-server-loss"), pytest.mark.vllm, pytest.mark.on_demand]


@pytest.mark.parametrize("label", load()["grpo-vllm-server-loss"].strategies)
def test_loss(label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    judge(lambda: judging.loss(vllm_trainings(subject, label), label), subject=subject, strategy=label)
