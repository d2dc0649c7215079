"""Known issue ``lora-zero3-checkpointing`` (trl 2514, transformers 47254): adapters cannot be trained under ZeRO-3.

Right is: with gradient checkpointing as TRL turns it on, the gradient norms of a training without it, and adapters that
learn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import adapters
from ..measured import every
from ..verdicts import failure_of, unequal
from .verdicts import failures_in

if TYPE_CHECKING:
    from collections.abc import Callable

ISSUE = "lora-zero3-checkpointing"
pytestmark = pytest.mark.known_issue("lora-zero3-checkpointing")


def test_training(subject: str, judge: Judge, lora_runs: Callable[[str, str], dict[str, Any]]) -> None:
    def measure() -> Finding:
        group = lora_runs(subject, "zero3")
        failures = failures_in(group)
        evidence = {
            "failures": failures.first,
            **failures.of_other_ranks,
            "checkpointing": {name: run.get("checkpointing") for name, run in group.items()},
            "grad_norm": {name: run.get("grad_norm") for name, run in group.items()},
        }
        failed = failure_of(ISSUE, failures.first)
        if failed:
            return Finding(failed, evidence)
        right = every(_right(run, group["config"]) for name, run in group.items() if name != "config")
        return Finding(Verdict.OK if right else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy="zero3")


def _right(run: dict[str, Any], plain: dict[str, Any]) -> bool:
    assert len(plain["grad_norm"]) == adapters.STEPS
    return (
        plain["checkpointing"] == "off" != run["checkpointing"]
        and run["lora_b_moved"] == run["lora_b"] > 0
        and not unequal(run["grad_norm"], plain["grad_norm"], relative=True)
    )
