"""Known issue ``ppo-deepspeed-argument``: PPO with DeepSpeed configured by ``PPOConfig(deepspeed=...)``.

That is how ``torchrun`` and the launchers of clusters do it, and what ``transformers.Trainer`` takes. Right is: the
engine is DeepSpeed's, of the requested stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.plugin.judging import Finding, Judge

from ..in_rank import ppo_stages
from .runs import require_ppo

if TYPE_CHECKING:
    from pytest_trlcompat.launch import Launcher
    from pytest_trlcompat.tiny import TinyModel

pytestmark = pytest.mark.known_issue("ppo-deepspeed-argument")

SETTINGS = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "train_micro_batch_size_per_gpu": "auto",
    "zero_allow_untested_optimizer": True,
}
NOT_BY_THE_LAUNCHER = {"ACCELERATE_USE_DEEPSPEED": "false", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "none"}


def test_zero3(subject: str, judge: Judge, launcher: Launcher, saved_mistral: TinyModel) -> None:
    def measure() -> Finding:
        require_ppo()
        result = launcher(
            ppo_stages.deepspeed_by_argument,
            subject,
            saved_mistral,
            SETTINGS,
            strategy="zero3",
            env=NOT_BY_THE_LAUNCHER,
            sharded=False,  # judged by the stage
        )
        found = result.values[0]
        return Finding(Verdict.OK if found["stage"] == 3 else Verdict.SILENT, found)

    judge(measure, subject=subject, strategy="zero3")
