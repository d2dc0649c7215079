"""Known issue ``grpo-scale-rewards`` (trl 3991): advantages are divided where they must not be, or the other way round.

``scale_rewards`` says by which deviation of the rewards GRPO divides its advantages: of their group, of the batch, or
by none. In trl 0.22.0 and 0.22.1 the default ``group`` divides by none, and ``none`` and ``batch`` by the group's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Absent, Finding, Judge

from ..in_rank import grpo_advantages
from ..measured import every

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trlcompat.tiny import TinyModel

pytestmark = pytest.mark.known_issue("grpo-scale-rewards")

TOLERANCE = 1e-5
"""Of advantages around 1, in float32."""


@pytest.mark.parametrize("scale", grpo_advantages.SCALES)
def test_single(
    scale: str, subject: str, judge: Judge, launch_once: Callable[..., list[Any]], saved_qwen2: TinyModel
) -> None:
    def measure() -> Finding:
        (measured,) = launch_once(grpo_advantages.advantages, subject, saved_qwen2, strategy="single")
        run = measured[scale]
        if "absent" in run:
            raise Absent(run["absent"])
        if "failure" in run:
            return Finding(Verdict.ERROR, run)
        pairs = zip(run["found"], run["expected"], strict=True)
        right = every(abs(found - expected) <= TOLERANCE * max(1.0, abs(expected)) for found, expected in pairs)
        return Finding(Verdict.OK if right else Verdict.SILENT, run)

    judge(measure, subject=subject, strategy="single" if scale == "group" else f"single-{scale}")
