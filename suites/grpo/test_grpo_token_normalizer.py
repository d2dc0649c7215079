"""Known issue ``grpo-token-normalizer`` (trl 5619, 6439): by how many tokens ``dapo``, TRL's default loss, divides.

An optimizer step must divide by the tokens that count of the generation, times the share of it that the step trains on:
where ``steps_per_generation`` is not ``gradient_accumulation_steps``, and where truncated completions do not count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Absent, Finding, Judge

from ..in_rank import grpo_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_trlcompat.tiny import TinyModel

pytestmark = pytest.mark.known_issue("grpo-token-normalizer")


@pytest.mark.parametrize("variant", ["steps_per_generation", "truncated"])
def test_single(
    variant: str, subject: str, judge: Judge, launch_once: Callable[..., list[Any]], saved_qwen2: TinyModel
) -> None:
    def measure() -> Finding:
        (measured,) = launch_once(grpo_steps.steps, subject, saved_qwen2, grpo_steps.ALONE, strategy="single")
        run = measured[variant]
        if "absent" in run:
            raise Absent(run["absent"])
        if "failure" in run:
            return Finding(Verdict.ERROR, run)
        return Finding(Verdict.SILENT if grpo_steps.wrong_numbers(run) else Verdict.OK, run)

    judge(measure, subject=subject, strategy=f"single-{variant}")
