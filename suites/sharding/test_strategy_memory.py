"""Known issue ``strategy-memory``: what a rank of GRPO holds of its accelerator's memory, against what was promised.

Right is: between steps, while it generates, in the reference model's forward pass, in the policy's forward and backward
pass and at the peak of a step, a rank holds no more copies of the model than its strategy and its arguments promise.
For the promises and their sources see :mod:`memory`; how memory is read is in :mod:`in_rank.memory`. The model is made
so that its parameters, and not its activations, fill the memory; ``single`` shows that they do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.plugin.judging import Finding, Judge, Untestable

from .memory import STRATEGIES, judge_memory, train

if TYPE_CHECKING:
    from pytest_trlcompat.launch import Launcher
    from pytest_trlcompat.tiny import TinyModel

    from ..launches import LaunchCache

pytestmark = [pytest.mark.known_issue("strategy-memory"), pytest.mark.every_pair]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory(
    strategy: str, subject: str, judge: Judge, launcher: Launcher, launches: LaunchCache, deep_qwen2: TinyModel
) -> None:
    def measure() -> Finding:
        if launcher.device == "cuda":
            raise Untestable("on a GPU, what cuBLAS allocates for itself counts as well, and is as large as this model")
        return judge_memory(strategy, train(launches, deep_qwen2, subject, strategy))

    judge(measure, subject=subject, strategy=strategy)
