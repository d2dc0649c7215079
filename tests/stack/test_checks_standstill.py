"""A training in which nothing moved is never silent, and names the reason; what judged nothing has not passed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.launch import Launcher

from .checks_bodies import build, build_grpo, trained, watch

NOTHING = "expected training to change weights, but in 2 steps no trainable one has changed: "
LATE = "until the training ended there was nothing to judge"


def train_masked(folder: str, first: int, **settings: Any) -> dict[str, Any]:
    """``first``: how many labels count in each row."""
    trainer = build(folder, **settings)
    for row in trainer.train_dataset:
        row["labels"] = [*row["input_ids"][:first], *[-100] * (12 - first)]
    return watch(trainer, on_failure="warn", checks=["moved", "steps"])


def train_with_equal_rewards(folder: str) -> dict[str, Any]:
    return watch(build_grpo(folder, lambda text: 1.0), on_failure="raise")


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero3", "fsdp2"])
def test_a_learning_rate_of_0_is_said_when_the_training_ends(launcher: Launcher, strategy: str, tmp_path: Path) -> None:
    for rank in trained(launcher, strategy, tmp_path, learning_rate=0.0, save_strategy="no"):
        assert ("moved", 2, "odd", f"{NOTHING}the learning rate was 0 in every step") in rank["said"]
        assert rank["unjudged"]["checkpoint"] == "no checkpoint was saved that can be loaded as a whole"


def test_labels_that_are_all_masked_are_said(launcher: Launcher, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optim": "sgd", "max_grad_norm": 0.0, "save_strategy": "no"}
    (rank,) = launcher(train_masked, str(tmp_path), 0, factor=0.0, strategy="single", **settings).values
    assert [text for _, _, _, text in rank["said"]] == [
        f"{NOTHING}every label was masked (-100) in all batches that were looked at"
    ]
    (rank,) = launcher(train_masked, str(tmp_path), 4, strategy="single", **settings).values
    assert rank["said"] == []


@pytest.mark.versions(trl=">=1.0", reason="a release whose GRPO trains as it is")
def test_rewards_that_are_all_equal_are_said(launcher: Launcher, tmp_path: Path) -> None:
    (rank,) = launcher(train_with_equal_rewards, str(tmp_path), strategy="single").values
    reason = "every advantage was 0 in all batches that were looked at, as where all rewards of each group are equal"
    assert ("moved", 2, "odd", f"{NOTHING}{reason}") in rank["said"]
    assert rank["unjudged"]["gradients"] == LATE
    assert "gradients" not in {check for check, _ in rank["checked"]}


def test_gradients_of_zeros_are_said(launcher: Launcher, tmp_path: Path) -> None:
    (rank,) = trained(launcher, "single", tmp_path, factor=0.0, save_strategy="no")
    assert [text for check, _, _, text in rank["said"] if check == "moved"] == [
        f"{NOTHING}every gradient norm in the log is 0"
    ]


def test_a_warmup_that_begins_with_0_is_no_alarm(launcher: Launcher, tmp_path: Path) -> None:
    settings = {"lr_scheduler_type": "linear", "warmup_steps": 2, "max_steps": 3, "save_strategy": "no"}
    (rank,) = trained(launcher, "single", tmp_path, **settings)
    assert rank["said"] == []
    assert "moved" not in rank["unjudged"]


def test_a_training_without_a_step_is_said(launcher: Launcher, tmp_path: Path) -> None:
    settings = {"num_train_epochs": 0, "max_steps": -1, "save_strategy": "no"}
    (rank,) = trained(launcher, "single", tmp_path, **settings)
    ((check, step, kind, text),) = rank["said"]
    assert (check, step, kind) == ("moved", 0, "odd")
    assert text.startswith("expected steps, but the trainer made none: look at max_steps")
    assert rank["unjudged"]["forward"] == LATE
