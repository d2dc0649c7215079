"""Known issue ``deepspeed-hook-registration`` (trl 2962): the method that DeepSpeed 0.16.4 renamed.

Right is: after each generation under ZeRO-3 all of DeepSpeed's hooks are there again, when the trainer generates
(``zero3``) and when ``unwrap_model_for_generation`` is given the engine, as other trainers do (``zero3-direct``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..launches import Failures
from ..verdicts import failure_of

if TYPE_CHECKING:
    from pytest_trlcompat.launch import LaunchResult

ISSUE = "deepspeed-hook-registration"
pytestmark = pytest.mark.known_issue("deepspeed-hook-registration")

ALL = 100
"""Fewer than the tiny model's hooks when all are there: 133 to 135."""


def test_training(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    def measure() -> Finding:
        ranks = grpo_runs("training", subject, "zero3").values
        run, failures = ranks[0], Failures.of([rank["failures"] for rank in ranks])
        hooks = run["hooks_in_loss"]
        evidence = {
            "failures": failures.first,
            **failures.of_other_ranks,
            "hooks_in_loss": hooks,
            "hooks_at_the_end": run["hooks_at_the_end"],
        }
        if failure_of(ISSUE, failures.first) is Verdict.BROKEN:  # other failures are other suites' matter
            return Finding(Verdict.BROKEN, evidence)
        if not any(hooks):  # training ended before its loss, or there is no engine
            return Finding(Verdict.ERROR, evidence)
        back = set(hooks) == {run["hooks_at_the_end"]} and min(hooks) > ALL
        return Finding(Verdict.OK if back else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy="zero3")


def test_unwrapping_the_engine(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    def measure() -> Finding:
        every = [rank["direct"]["engine"] for rank in grpo_runs("training", subject, "zero3").values]
        found, failures = every[0], Failures.of([{"engine": rank["failure"]} for rank in every])
        if failed := failure_of(ISSUE, failures.first):
            return Finding(failed, {**found, "failure": failures.first["engine"], **failures.of_other_ranks})
        before, _during, after = found["hooks"]
        return Finding(Verdict.OK if before == after > ALL else Verdict.SILENT, found)

    judge(measure, subject=subject, strategy="zero3-direct")
