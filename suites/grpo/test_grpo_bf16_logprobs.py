"""Known issue ``grpo-bf16-logprobs``: GRPO takes the log-softmax of logits in bfloat16 in bfloat16.

Right is: log-probabilities are computed in float32. A number in float32 is one that bfloat16 can hold by chance alone,
once in 65,536; the result of an operator in bfloat16 always is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.launch.result import is_of_ended_peer
from pytest_trlcompat.plugin.judging import Finding, Judge, Untestable

from ..measured import largest
from ..settings.table import row

if TYPE_CHECKING:
    from ..settings.trainings import SettingTrainings

pytestmark = pytest.mark.known_issue("grpo-bf16-logprobs")


@pytest.mark.parametrize("label", ["single-bf16_weights", "zero2-bf16"])
def test_log_probabilities(label: str, subject: str, judge: Judge, setting_trainings: SettingTrainings) -> None:
    def measure() -> Finding:
        ranks, _ = setting_trainings.ranks_and_truths(subject, row(label), neighbours=False)
        failures = [rank["failure"] for rank in ranks if rank["failure"]]
        if failures:
            root = next((text for text in failures if not is_of_ended_peer(text)), failures[0])
            return Finding(Verdict.ERROR, {"failure": root})
        shares = [rank["rounded"] for rank in ranks]
        if None in shares:
            raise Untestable("this release of TRL computes log-probabilities in a closure, where nothing can look")
        wrong = largest(shares) > 0.5
        return Finding(Verdict.SILENT if wrong else Verdict.OK, {"rounded": shares, "losses": ranks[0]["losses"]})

    judge(measure, subject=subject, strategy=label)
