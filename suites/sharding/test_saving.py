"""Whether what FSDP shards is saved whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from .trainings import NO_SHARD, read_safetensors

if TYPE_CHECKING:
    from .trainings import Trainings

# fsdp2 has its default state dict type, SHARDED_STATE_DICT; the others FULL_STATE_DICT, which is theirs.
STRATEGIES = ["fsdp1", NO_SHARD, "fsdp2"]


@pytest.mark.known_issue("fsdp-sharded-save")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_saved_policy(strategy: str, subject: str, judge: Judge, trained: Trainings) -> None:
    """``save_model`` writes nothing unless the state dict is full (transformers 30491).

    Right is: after training, ``save_model`` leaves a file from which another process reads the policy's weights,
    bitwise. The test process reads it; expected is the policy that the ranks have gathered.
    """

    def measure() -> Finding:
        training = trained(subject, strategy)
        failure = training.failure or next((rank["saving"] for rank in training.ranks if rank["saving"]), None)
        if failure is not None:
            return Finding(Verdict.ERROR, {"failure": failure, **training.failures_of_other_ranks})
        policy, saved = training.first["policy"], read_safetensors(training.folder)
        evidence = {
            "files": sorted(path.name for path in training.folder.glob("*")),
            "tensors_saved": len(saved),
            "tensors": len(policy),
            "bitwise_equal": sum(saved.get(name) == data for name, data in policy.items()),
        }
        return Finding(Verdict.OK if saved == policy else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy=strategy)
