"""Known issue ``grpo-vllm-server-release``: the vLLM server that GRPO asks is of another release of TRL.

Right is: as for ``grpo-vllm-server-weights`` and ``grpo-vllm-batches``. An error is not right either, but is seen. Part
of no sweep, since the other releases have to be provided: ``nox -s server_releases``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.known_issues import load
from pytest_trlcompat.plugin.judging import Judge

from . import verdicts

if TYPE_CHECKING:
    from .trainings import VLLMTrainings

ISSUE = "grpo-vllm-server-release"
pytestmark = [pytest.mark.known_issue("grpo-vllm-server-release"), pytest.mark.vllm, pytest.mark.on_demand]


@pytest.mark.parametrize("label", load()[ISSUE].strategies)
def test_release(label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    judge(lambda: verdicts.released(vllm_trainings(subject, label), label, ISSUE), subject=subject, strategy=label)
