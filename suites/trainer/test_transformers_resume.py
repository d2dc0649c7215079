"""Known issue ``transformers-resume`` (transformers 34631): a training cannot go on from its checkpoint.

Right is: the losses and gradient norms of a training that was never interrupted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.plugin.judging import Finding, Judge

from ..verdicts import of_resuming

if TYPE_CHECKING:
    from pytest_trlcompat.launch import LaunchResult

pytestmark = pytest.mark.known_issue("transformers-resume")


def test_resuming(subject: str, judge: Judge, grpo_runs: Callable[..., LaunchResult]) -> None:
    def measure() -> Finding:
        return of_resuming(grpo_runs("resumed", subject, "zero3").values)

    judge(measure, subject=subject, strategy="zero3")
