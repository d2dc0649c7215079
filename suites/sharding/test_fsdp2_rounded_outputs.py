"""Known issue ``fsdp2-rounded-outputs``: in mixed precision FSDP2 has a model return bfloat16, where others return float32.

Right is: what GRPO's model returns to the trainer, logits or log-probabilities, has the dtype that it has in a single
process with the same arguments. The evidence has the losses of both, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.launch.result import is_of_ended_peer
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..settings.table import row

if TYPE_CHECKING:
    from ..settings.trainings import SettingTrainings

pytestmark = pytest.mark.known_issue("fsdp2-rounded-outputs")

LABEL = "fsdp2-bf16"


def test_what_the_model_returns(subject: str, judge: Judge, setting_trainings: SettingTrainings) -> None:
    def measure() -> Finding:
        ranks, (truth,) = setting_trainings.ranks_and_truths(subject, row(LABEL), neighbours=False)
        failures = [rank["failure"] for rank in (truth, *ranks) if rank["failure"]]
        if failures:
            root = next((text for text in failures if not is_of_ended_peer(text)), failures[0])
            return Finding(Verdict.ERROR, {"failure": root})
        evidence = {
            "returned": ranks[0]["returned"],
            "returned_single": truth["returned"],
            "loss": [sum(step) / len(step) for step in zip(*(rank["losses"] for rank in ranks), strict=True)],
            "loss_single": truth["losses"],
        }
        assert truth["returned"], "the trained model returned neither logits nor log-probabilities"
        right = all(rank["returned"] == truth["returned"] for rank in ranks)
        return Finding(Verdict.OK if right else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy=LABEL)
