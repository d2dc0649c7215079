"""Known issue ``grpo-temperature`` (trl 3029): tokens are sampled at one temperature and scored at another.

Completions are sampled from softmax(logits / temperature). trl before 0.16.0 scores them without the division, so that
ratio, KL and gradient are those of another policy, unless the temperature is 1; its default was 0.9.
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

pytestmark = pytest.mark.known_issue("grpo-temperature")

TOLERANCE = 1e-5
"""Of a log-probability in float32: two orders above rounding, five below the errors of the bug."""


def test_single(subject: str, judge: Judge, launch_once: Callable[..., list[Any]], sharp_qwen2: TinyModel) -> None:
    def measure() -> Finding:
        (measured,) = launch_once(grpo_logps.log_probabilities, subject, sharp_qwen2, strategy="single")
        return Finding(_verdict(measured["temperature"]), measured["temperature"])

    judge(measure, subject=subject, strategy="single")


def _verdict(run: dict[str, Any]) -> Verdict:
    if "failure" in run:
        return Verdict.ERROR
    return Verdict.OK if run["max_abs_error"] <= TOLERANCE else Verdict.SILENT  # NaN is silent, too
