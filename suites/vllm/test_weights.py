"""How the policy's weights reach vLLM: which, of which adapters, at what cost, and what becomes of the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.plugin.judging import Judge

from . import verdicts
from .trainings import measurements

if TYPE_CHECKING:
    from .trainings import VLLMTrainings

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("trainer", "label"),
    measurements("weights", "server-weights", "sleep", "dora", "tied-embeddings", "trained-tokens"),
)
def test_weights(trainer: str, label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    """vLLM generates with other weights than the policy has.

    Right is: whenever the engine is asked, each of its tensors is the policy's in the engine's dtype, adapters merged;
    and each synchronisation brings each of the policy's parameters exactly once. ``server-weights``: where the engine
    is a server. ``sleep`` (trl 5312): where it releases its memory between generations, and came back with the
    checkpoint's weights. ``dora``, ``tied-embeddings``, ``trained-tokens``: of adapters that are no plain LoRA, or that
    part tied embeddings.
    """
    issue = judge.issue.id
    judge(
        lambda: verdicts.weights(vllm_trainings(subject, label, trainer), label, issue), subject=subject, strategy=label
    )


@pytest.mark.parametrize(("trainer", "label"), measurements("merge-drift"))
def test_policy(trainer: str, label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    """A synchronisation changes the policy's own weights (trl 6688).

    Right is: the policy is bitwise as it was before, though its adapter was merged for the engine.
    """
    judge(lambda: verdicts.policy(vllm_trainings(subject, label, trainer), label), subject=subject, strategy=label)


@pytest.mark.parametrize(("trainer", "label"), measurements("sync-memory"))
def test_memory(trainer: str, label: str, subject: str, judge: Judge, vllm_trainings: VLLMTrainings) -> None:
    """Handing weights to vLLM gathers the whole model on each rank.

    Right is: a rank of ZeRO-3 or FSDP gathers a small part of the model at a time, as in a forward pass; of a model of
    twelve layers, less than half.
    """
    judge(lambda: verdicts.memory(vllm_trainings(subject, label, trainer)), subject=subject, strategy=label)
