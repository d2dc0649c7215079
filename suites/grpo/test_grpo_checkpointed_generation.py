"""Known issue ``grpo-checkpointed-generation``: completions sampled with gradient checkpointing on are noise.

Right is: each token is drawn with the probabilities of a plain full forward pass, as without gradient checkpointing,
and each token of the sequence goes through the model once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import grpo_sampling

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trlcompat.tiny import TinyModel

pytestmark = pytest.mark.known_issue("grpo-checkpointed-generation")

TOLERANCE = 1e-2
"""Of a probability, over the error without checkpointing, which is the matter of ``grpo-sampling``; noise has 0.1."""


def test_single(subject: str, judge: Judge, launch_once: Callable[..., list[Any]], sharp_qwen2: TinyModel) -> None:
    def measure() -> Finding:
        (measured,) = launch_once(grpo_sampling.sampling, subject, sharp_qwen2, strategy="single")
        run = measured["checkpointing"]
        return Finding(_verdict(run, measured["plain"]), run)

    judge(measure, subject=subject, strategy="single")


def _verdict(run: dict[str, Any], without: dict[str, Any]) -> Verdict:
    if not run["max_abs_error"] - without["max_abs_error"] <= TOLERANCE:  # also NaN
        return Verdict.SILENT
    return Verdict.WASTEFUL if run["positions"] > run["positions_needed"] else Verdict.OK
