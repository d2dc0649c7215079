"""Known issue ``strategy-memory``: what a rank of GRPO holds of its accelerator's memory, against what was promised.

Right is: between steps, while it generates, in the reference model's forward pass and at the peak of a step, a rank
holds no more copies of the model than its strategy and its arguments promise. For the promises and their sources see
:mod:`memory`; how memory is read is in :mod:`in_rank.memory`. The model is made so that its parameters, and not its
activations, fill the memory; ``single`` shows that they do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat import stack
from pytest_trlcompat.plugin.judging import Absent, Finding, Judge

from ..in_rank import memory as in_rank
from ..in_rank import models
from .memory import BUCKET, NO_GATHER, judge_generation, judge_memory
from .trainings import WORLD_SIZE, built_as_asked

if TYPE_CHECKING:
    from pytest_trlcompat.launch import Launcher
    from pytest_trlcompat.tiny import TinyModel

    from ..launches import LaunchCache

pytestmark = pytest.mark.known_issue("strategy-memory")

_ZERO = {"reduce_bucket_size": BUCKET, "overlap_comm": False}
_ZERO3 = {**_ZERO, "stage3_prefetch_bucket_size": BUCKET, "stage3_max_live_parameters": BUCKET}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "single": {},
    "ddp": {},
    "zero2": {"zero_optimization": _ZERO},
    "zero3": {"zero_optimization": _ZERO3},
    NO_GATHER: {"zero_optimization": _ZERO3},
    "fsdp1": {},
    "fsdp2": {},
}


@pytest.fixture(scope="module")
def deep_qwen2(tiny_qwen2: Callable[..., TinyModel], launcher: Launcher) -> TinyModel:
    """Twelve layers, each a twelfth of nearly all parameters, so that one layer and all are far apart."""
    model = tiny_qwen2(num_hidden_layers=12, hidden_size=128, intermediate_size=512)
    launcher(models.save_model, model, strategy="single")
    return model


@pytest.mark.parametrize("strategy", OPTIONS)
def test_memory(strategy: str, subject: str, judge: Judge, launches: LaunchCache, deep_qwen2: TinyModel) -> None:
    def measure() -> Finding:
        if strategy == NO_GATHER and not stack.satisfied({"trl": ">=0.15"}, stack.installed()):
            raise Absent("GRPOConfig has ds3_gather_for_generation from trl 0.15 on")
        kind = strategy.partition("-")[0]
        result = launches(
            in_rank.train,
            subject,
            deep_qwen2,
            **({"ds3_gather_for_generation": False} if strategy == NO_GATHER else {}),
            strategy=kind,
            options=OPTIONS[strategy],
            world_size=1 if kind == "single" else WORLD_SIZE,
            sharded=False,  # a broken trainer fails before it has wrapped anything
        )
        failure = next((rank["failure"] for rank in result.values if rank["failure"]), None)
        if kind != "single":
            built_as_asked(kind, result.ranks[0].proof["engines"], failure)
        return (judge_generation if strategy == NO_GATHER else judge_memory)(strategy, result.values)

    judge(measure, subject=subject, strategy=strategy)
