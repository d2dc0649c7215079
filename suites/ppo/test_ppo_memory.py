"""Known issue ``ppo-strategy-memory``: what a rank of PPO holds of its accelerator's memory, against what was promised.

Right is: between updates, while it generates, in the reference model's forward pass, while it scores, in the training
of policy and value model and at the peak of an update, a rank holds no more copies of the models than its strategy and
its arguments promise: of policy and value model as GRPO of its policy, of reference and reward model, which are as
large together, as GRPO of its reference model. For the promises and their sources see :mod:`suites.sharding.memory`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat import stack
from pytest_trlcompat.plugin.judging import Absent, Finding, Judge, Untestable

from ..in_rank import ppo_memory
from ..sharding.memory import STRATEGIES, judge_memory
from .runs import require_ppo

if TYPE_CHECKING:
    from pytest_trlcompat.launch import Launcher
    from pytest_trlcompat.tiny import TinyModel

    from ..launches import LaunchCache

pytestmark = [pytest.mark.known_issue("ppo-strategy-memory"), pytest.mark.every_pair]


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero2", "zero3", "fsdp1", "fsdp2"])
def test_memory(
    strategy: str, subject: str, judge: Judge, launcher: Launcher, launches: LaunchCache, deep_qwen2: TinyModel
) -> None:
    def measure() -> Finding:
        require_ppo()
        if strategy == "fsdp2" and not stack.satisfied({"accelerate": ">=1.6"}, stack.installed()):
            raise Absent("Accelerate knows FSDP2 from 1.6.0 on, and takes FSDP1 before without a word")
        if launcher.device == "cuda":
            raise Untestable("on a GPU, what cuBLAS allocates for itself counts as well, and is as large as this model")
        result = launches(
            ppo_memory.train,
            subject,
            deep_qwen2,
            strategy=strategy,
            options=STRATEGIES[strategy],
            **({"world_size": 1} if strategy == "single" else {}),
            sharded=False,  # a broken trainer fails before it has wrapped anything
        )
        return judge_memory(strategy, result.values, "scoring")

    judge(measure, subject=subject, strategy=strategy)
