"""Known issue ``grpo-vllm-merge-drift`` (trl 6688): a synchronisation changes the policy's own weights.

Right is: the policy is bitwise as it was before, though its adapter was merged for the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.known_issues import load
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

if TYPE_CHECKING:
    from .trainings import VLLMTrainings

ISSUE = "grpo-vllm-merge-drift"
pytestmark = [pytest.mark.known_issue("grpo-vllm-merge-drift"), pytest.mark.vllm]


@pytest.mark.parametrize("label", load()[ISSUE].strategies)
def test_policy(label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    def measure() -> Finding:
        training = vllm_trainings(subject, label)
        if training.failure:
            return Finding(Verdict.ERROR, training.evidence())
        synchronisations = [each for rank in training.ranks for each in rank["synchronisations"]]
        assert len({each["step"] for each in synchronisations}) > 1, "the adapter was zero when it was merged"
        changed = [each["changed"] for each in synchronisations]
        evidence = {
            **training.evidence(),
            "synchronisations": len(synchronisations),
            "parameters_changed": sorted({name for each in changed for name in each}),
            "most_changed": max((amount for each in changed for amount in each.values()), default=0.0),
        }
        return Finding(Verdict.SILENT if any(changed) else Verdict.OK, evidence)

    judge(measure, subject=subject, strategy=label)
