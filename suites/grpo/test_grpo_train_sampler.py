"""Known issue ``grpo-train-sampler``: Transformers passes the data set to a method that takes none.

Right is: training runs, and each step draws prompts that no step before has drawn, each as often as it is completed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import grpo
from ..verdicts import failure_of

if TYPE_CHECKING:
    from pytest_trlcompat.launch import LaunchResult

ISSUE = "grpo-train-sampler"
pytestmark = pytest.mark.known_issue("grpo-train-sampler")

COMPLETIONS_PER_PROMPT = 2


def test_sampled_prompts(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    def measure() -> Finding:
        run = grpo_runs("single", subject, "single").values[0]["undisturbed"]
        failed = failure_of(ISSUE, run["failures"])
        if failed:
            return Finding(failed, {"failures": run["failures"]})
        drawn = Counter(prompt for step in run["prompts"] for prompt in step)
        evidence = {"losses": run["losses"], "drawn": len(drawn), "times": sorted(set(drawn.values()))}
        rows = grpo.ROWS * grpo.STEPS * run["accumulated"]
        right = set(drawn.values()) == {COMPLETIONS_PER_PROMPT} and sum(drawn.values()) == rows
        return Finding(Verdict.OK if right else Verdict.SILENT, evidence)

    judge(measure, subject=subject, strategy="single")
