"""Known issue ``grpo-prompt-mask`` (trl 2708): the padding of prompts is attended to when they are scored.

trl 0.14.0 scores prompts and completions without an attention mask. Rows whose prompt is padded on the left then have
log-probabilities that are off by several nats, for the policy and for the reference model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import grpo_logps

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trlcompat.tiny import TinyModel

pytestmark = pytest.mark.known_issue("grpo-prompt-mask")

TOLERANCE = 1e-5
"""Of a log-probability in float32: two orders above rounding, five below the errors of the bug."""


def test_single(subject: str, judge: Judge, launch_once: Callable[..., list[Any]], sharp_qwen2: TinyModel) -> None:
    def measure() -> Finding:
        (measured,) = launch_once(grpo_logps.log_probabilities, subject, sharp_qwen2, strategy="single")
        return Finding(_verdict(measured["padded"]), measured["padded"])

    judge(measure, subject=subject, strategy="single")


def _verdict(run: dict[str, Any]) -> Verdict:
    if "failure" in run:
        return Verdict.ERROR
    return Verdict.OK if run["max_abs_error"] <= TOLERANCE else Verdict.SILENT  # NaN is silent, too
