"""Known issue ``fsdp2-rounded-outputs``: in mixed precision FSDP2 casts what a model returns to bfloat16.

Right is: the trainer gets the outputs in the dtype in which the model has computed them: GRPO its logits or
log-probabilities, a plain ``Trainer`` the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.launch.result import is_of_ended_peer
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import settings
from ..settings.table import row
from .trainings import WORLD_SIZE, built_as_asked

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

    from ..launches import LaunchCache
    from ..settings.trainings import SettingTrainings

pytestmark = pytest.mark.known_issue("fsdp2-rounded-outputs")


def test_outputs_of_grpo(subject: str, judge: Judge, setting_trainings: SettingTrainings) -> None:
    label = "fsdp2-bf16"

    def measure() -> Finding:
        ranks, (truth,) = setting_trainings.ranks_and_truths(subject, row(label), neighbours=False)
        losses = [sum(step) / len(step) for step in zip(*(rank["losses"] for rank in ranks), strict=True)]
        return judge_outputs(ranks, {"losses": losses, "losses_single": truth["losses"]})

    judge(measure, subject=subject, strategy=label)


def test_a_loss(subject: str, judge: Judge, launches: LaunchCache, layered_qwen2: TinyModel) -> None:
    label = "fsdp2-bf16_loss"

    def measure() -> Finding:
        found = launches(
            settings.outputs_of_plain_training,
            subject,
            layered_qwen2,
            strategy="fsdp2",
            world_size=WORLD_SIZE,
            sharded=False,
        )
        failures = [rank["failure"] for rank in found.values if rank["failure"]]
        built_as_asked("fsdp2", found.ranks[0].proof["engines"], failures[0] if failures else None)
        return judge_outputs(found.values, {"loss": found.values[0]["loss"]})

    judge(measure, subject=subject, strategy=label)


def judge_outputs(ranks: Sequence[Mapping[str, Any]], evidence: Mapping[str, Any]) -> Finding:
    failures = [rank["failure"] for rank in ranks if rank["failure"]]
    if failures:
        root = next((text for text in failures if not is_of_ended_peer(text)), failures[0])
        return Finding(Verdict.ERROR, {"failure": root})
    assert all(rank["computed"] for rank in ranks), "nothing has looked at what the model computed"
    right = all(rank["returned"] == rank["computed"] for rank in ranks)
    dtypes = {name: ranks[0][name] for name in ("computed", "returned")}
    return Finding(Verdict.OK if right else Verdict.SILENT, {**dtypes, **evidence})
