"""How the policy's weights reach vLLM: which, of which adapters, at what cost, and what becomes of the policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.catalog.known_issues import load
from pytest_trlcompat.plugin.judging import Judge

from . import verdicts

if TYPE_CHECKING:
    from .trainings import VLLMTrainings

pytestmark = pytest.mark.vllm

MARKS = (
    pytest.mark.known_issue("grpo-vllm-weights"),
    # The engine is a server.
    pytest.mark.known_issue("grpo-vllm-server-weights"),
    # The engine slept, and generates with the checkpoint's weights (trl 5312).
    pytest.mark.known_issue("grpo-vllm-sleep"),
    # Adapters that are no plain LoRA, or that part tied embeddings.
    pytest.mark.known_issue("grpo-vllm-dora"),
    pytest.mark.known_issue("grpo-vllm-tied-embeddings"),
    pytest.mark.known_issue("grpo-vllm-trained-tokens"),
)


def _measurements() -> Iterator[Any]:
    for mark in MARKS:
        (issue,) = mark.args
        for label in load()[issue].strategies:
            yield pytest.param(label, marks=mark, id=f"{issue}-{label}")


@pytest.mark.parametrize("label", [*_measurements()])
def test_weights(label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    """vLLM generates with other weights than the policy has.

    Right is: whenever the engine is asked, each of its tensors is the policy's in the engine's dtype, adapters merged;
    and each synchronisation brings each of the policy's parameters exactly once.
    """
    issue = judge.issue.id
    judge(lambda: verdicts.weights(vllm_trainings(subject, label), label, issue), subject=subject, strategy=label)


@pytest.mark.known_issue("grpo-vllm-merge-drift")
@pytest.mark.parametrize("label", load()["grpo-vllm-merge-drift"].strategies)
def test_policy(label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    """A synchronisation changes the policy's own weights (trl 6688).

    Right is: the policy is bitwise as it was before, though its adapter was merged for the engine.
    """
    judge(lambda: verdicts.policy(vllm_trainings(subject, label), label), subject=subject, strategy=label)


@pytest.mark.known_issue("grpo-vllm-sync-memory")
@pytest.mark.parametrize("label", load()["grpo-vllm-sync-memory"].strategies)
def test_memory(label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    """Handing weights to vLLM gathers the whole model on each rank.

    Right is: a rank of ZeRO-3 or FSDP gathers a small part of the model at a time, as in a forward pass; of a model of
    twelve layers, less than half.
    """
    judge(lambda: verdicts.memory(vllm_trainings(subject, label)), subject=subject, strategy=label)
