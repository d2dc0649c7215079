"""Whether PPO is built, by the launcher that a user has, and with the engine that was asked for."""

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

    from .runs import PPORuns

BY_ARGUMENT = {
    # At DeepSpeed's default threshold a tiny model's parameters are never partitioned.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "train_micro_batch_size_per_gpu": "auto",
    "zero_allow_untested_optimizer": True,
}
# In place of what a launch sets under this strategy, so that the argument alone asks for DeepSpeed.
NOT_BY_THE_LAUNCHER = {"ACCELERATE_USE_DEEPSPEED": "false", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "none"}


@pytest.mark.known_issue("ppo-newer-trainer")
def test_construction(subject: str, judge: Judge, ppo_runs: PPORuns) -> None:
    """PPOv2 makes no optimizer with newer releases of Transformers.

    Right is: the trainer is built, and trains to the end.
    """

    def measure() -> Finding:
        run = ppo_runs(subject, "ddp")
        failed = run.failed(["construct"], judge.issue)
        if failed is not None:
            return failed
        assert run.trained or subject == "upstream", run
        return Finding(Verdict.OK, run.evidence(["construct"]))

    judge(measure, subject=subject, strategy="ddp")


@pytest.mark.known_issue("ppo-config-after-grpo")
def test_configuration(subject: str, judge: Judge, ppo_runs: PPORuns) -> None:
    """PPO's configuration made in a process that has imported GRPO's."""

    def measure() -> Finding:
        return ppo_runs(subject, "ddp").failed(["config"], judge.issue) or Finding(Verdict.OK)

    judge(measure, subject=subject, strategy="ddp")


@pytest.mark.known_issue("ppo-accelerate-state")
@pytest.mark.parametrize("stage", [2, 3])
def test_launched_by_accelerate(stage: int, subject: str, judge: Judge, ppo_runs: PPORuns) -> None:
    """PPO built in the environment of ``accelerate launch`` (trl 2377, 2555, 3453).

    Right is: the trainer is built, and its engine is DeepSpeed's, of the requested stage.
    """

    def measure() -> Finding:
        run = ppo_runs(subject, f"zero{stage}")
        failed = run.failed(["construct"], judge.issue)
        if failed is not None:
            return failed
        zero_stage = run.engines["deepspeed"]["zero_stage"]
        return Finding(Verdict.OK if zero_stage == stage else Verdict.SILENT, {"zero_stage": zero_stage})

    judge(measure, subject=subject, strategy=f"zero{stage}")


@pytest.mark.known_issue("ppo-deepspeed-argument")
def test_deepspeed_by_argument(subject: str, judge: Judge, launcher: Launcher, saved_mistral: TinyModel) -> None:
    """PPO with DeepSpeed configured by ``PPOConfig(deepspeed=...)``.

    That is how ``torchrun`` and the launchers of clusters do it, and what ``transformers.Trainer`` takes. Right is: the
    engine is DeepSpeed's, of the requested stage.
    """

    def measure() -> Finding:
        require_ppo()
        result = launcher(
            ppo_stages.deepspeed_by_argument,
            subject,
            saved_mistral,
            BY_ARGUMENT,
            strategy="zero3",
            env=NOT_BY_THE_LAUNCHER,
            sharded=False,  # judged by the stage
        )
        engine = result.values[0]
        return Finding(Verdict.OK if engine["stage"] == 3 else Verdict.SILENT, engine)

    judge(measure, subject=subject, strategy="zero3")
