"""Known issue ``grpo-vllm-weights``: vLLM generates with other weights than the policy has.

Right is: whenever the engine is asked, each of its tensors is the policy's in the engine's dtype, adapters merged; and
each synchronisation brings each of the policy's parameters exactly once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..grpo.verdicts import failure_of
from .trainings import LABELS

if TYPE_CHECKING:
    from .trainings import VLLMTrainings

ISSUE = "grpo-vllm-weights"
pytestmark = [pytest.mark.known_issue("grpo-vllm-weights"), pytest.mark.vllm]

STRAYS = ("missing", "unknown", "repeated")


@pytest.mark.parametrize("label", LABELS)
def test_weights(label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    def measure() -> Finding:
        training = vllm_trainings(subject, label)
        if training.failure:
            failed = failure_of(ISSUE, {"training": training.failure})
            return Finding(failed or Verdict.ERROR, training.evidence())
        generations = [each for rank in training.ranks for each in rank["generations"]]
        synchronisations = [each for rank in training.ranks for each in rank["synchronisations"]]
        steps = {each["step"] for each in generations}
        assert len(steps) > 1, "the policy was asked for once alone, before it had moved"
        assert synchronisations, "nothing was synchronised"
        assert all(each["tensors"] > 0 for each in generations)
        if label.endswith(("lora", "lora_bf16", "whole")):
            assert max(each["margin"] for each in generations) > 4, "the adapter is too small to be seen"
        off = [each for each in generations if each["wrong"]]
        strays = {name: sorted({each for one in synchronisations for each in one[name]}) for name in STRAYS}
        evidence = {
            **training.evidence(),
            "generations": len(generations),
            "steps": sorted(steps),
            "evaluations": sum(each["evaluation"] for each in generations),
            "tensors": generations[0]["tensors"],
            "generations_off": len(off),
            "tensors_off": sorted({name for each in off for name in each["wrong"]}),
            "most_off": max((amount for each in off for amount in each["wrong"].values()), default=0.0),
            **strays,
        }
        return Finding(Verdict.SILENT if off or any(strays.values()) else Verdict.OK, evidence)

    judge(measure, subject=subject, strategy=label)
