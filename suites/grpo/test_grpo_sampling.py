"""Known issue ``grpo-sampling`` (trl 5783): completions are sampled from another distribution than they are scored by.

Right is: each token is drawn with the probabilities ``softmax(logits / temperature)``, whatever the model's own
``generation_config`` prefers, which stays as it is.
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

pytestmark = pytest.mark.known_issue("grpo-sampling")

TOLERANCE = 1e-5
"""Of a probability: two orders above rounding; the tokens that a limit of 50 leaves out have about 1e-2 together."""


@pytest.mark.parametrize("variant", ["plain", "model_defaults"])
def test_single(
    variant: str, subject: str, judge: Judge, launch_once: Callable[..., list[Any]], sharp_qwen2: TinyModel
) -> None:
    def measure() -> Finding:
        (measured,) = launch_once(grpo_sampling.sampling, subject, sharp_qwen2, strategy="single")
        run = measured[variant]
        assert run["tokens"] > 0, "nothing was sampled"
        assert run["model_generation_config_kept"], "the model's own preferences were lost"
        return Finding(Verdict.OK if run["max_abs_error"] <= TOLERANCE else Verdict.SILENT, run)

    judge(measure, subject=subject, strategy="single" if variant == "plain" else f"single-{variant}")
