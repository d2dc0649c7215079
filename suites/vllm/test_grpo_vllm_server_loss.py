"""Known issue ``grpo-vllm-server-loss``: a training goes on after its vLLM server was lost.

Right is: where the server has ended, or was restarted, every rank ends with an error, and no completion comes from
other weights than the policy's. One that is late is waited for, and all is as without that. Part of a sweep with
``--issue`` alone: each training costs a server, and a minute in which TRL's client asks again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.known_issues import load
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import vllm_training
from . import verdicts

if TYPE_CHECKING:
    from .trainings import VLLMTrainings

ISSUE = "grpo-vllm-server-loss"
pytestmark = [pytest.mark.known_issue("grpo-vllm-server-loss"), pytest.mark.vllm, pytest.mark.on_demand]


@pytest.mark.parametrize("label", load()[ISSUE].strategies)
def test_loss(label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    def measure() -> Finding:
        training = vllm_trainings(subject, label)
        is_late = vllm_training.is_late(label.partition("-")[2])
        return verdicts.late(training, label, ISSUE) if is_late else verdicts.loss(training, label)

    judge(measure, subject=subject, strategy=label)
