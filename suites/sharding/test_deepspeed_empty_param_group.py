"""Known issue ``deepspeed-empty-param-group``: a group of parameters that DeepSpeed drops and the scheduler counts.

Right is: an adapter without biases, all of whose parameters have weight decay, trains under ZeRO-2, and every
``lora_B`` moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import adapters
from ..verdicts import failure_of

if TYPE_CHECKING:
    from collections.abc import Callable

ISSUE = "deepspeed-empty-param-group"
pytestmark = pytest.mark.known_issue("deepspeed-empty-param-group")


def test_adapter_without_biases(subject: str, judge: Judge, lora_runs: Callable[[str, str], dict[str, Any]]) -> None:
    def measure() -> Finding:
        run = lora_runs(subject, "zero2")["config"]
        failed = failure_of(ISSUE, {"train": run["failure"]} if run["failure"] else {})
        if failed:
            return Finding(failed, run)
        moved = run["lora_b_moved"] == run["lora_b"] > 0 and not run["without_gradient"] and not run["frozen_moved"]
        return Finding(Verdict.OK if moved and len(run["losses"]) == adapters.STEPS else Verdict.SILENT, run)

    judge(measure, subject=subject, strategy="zero2")
