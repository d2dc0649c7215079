"""Known issue ``grpo-gradient-accumulation`` (trl 2617, transformers 35207, 35808): how the gradient is divided.

Two optimizer steps over two micro-batches each: every weight must move as the objective over all their completions
says, and the loss that is reported must be that objective.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import grpo_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trlcompat.tiny import TinyModel

pytestmark = pytest.mark.known_issue("grpo-gradient-accumulation")

REFUSED = "no_sync context manager is incompatible with gradient partitioning"
ACCUMULATING = ("grpo", "bnpo", "dapo", "num_iterations")


def test_single(subject: str, judge: Judge, launch_once: Callable[..., list[Any]], saved_qwen2: TinyModel) -> None:
    def measure() -> Finding:
        (measured,) = launch_once(grpo_steps.steps, subject, saved_qwen2, grpo_steps.ALONE, strategy="single")
        return _finding({name: measured[name] for name in ACCUMULATING})

    judge(measure, subject=subject, strategy="single")


def test_zero2(subject: str, judge: Judge, launch_once: Callable[..., list[Any]], saved_qwen2: TinyModel) -> None:
    def measure() -> Finding:
        measured = launch_once(grpo_steps.steps, subject, saved_qwen2, grpo_steps.RANKS, strategy="zero2")
        return _finding(measured[0])

    judge(measure, subject=subject, strategy="zero2")


def _finding(runs: dict[str, dict[str, Any]]) -> Finding:
    assert "absent" not in runs["grpo"], "every release can accumulate gradients"
    verdicts = [_verdict(run) for run in runs.values() if "absent" not in run]
    worst = next((verdict for verdict in verdicts if verdict is not Verdict.OK), Verdict.OK)
    return Finding(worst, runs)


def _verdict(run: dict[str, Any]) -> Verdict:
    if "failure" in run:
        return Verdict.BROKEN if REFUSED in run["failure"] else Verdict.ERROR
    return Verdict.SILENT if grpo_steps.wrong_numbers(run) else Verdict.OK
