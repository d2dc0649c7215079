"""Weights that stay as they were: right where their type cannot show the steps, and never right where it can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.launch import Launcher

from .checks_bodies import watch
from .healthy_bodies import arguments, language_model, rows

pytest.importorskip("trl")

SMALL: dict[str, Any] = {"learning_rate": 1e-6, "warmup_steps": 200}
LARGE: dict[str, Any] = {"learning_rate": 1e-2, "lr_scheduler_type": "constant"}
TOO_SMALL = "and that rate is too small for the type of the weights to show a step at their size"


def train(folder: str, which: str, *, freeze_at: int | None = None, **settings: Any) -> dict[str, Any]:
    """A training in bfloat16 weights, none of them near 0, for 20 steps.

    Args:
        which: part of the names of the parameters that train.
        freeze_at: a step from which on the optimizer's steps are undone.
    """
    import torch
    import transformers

    model = language_model("dense").to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(which in name)
        with torch.no_grad():
            parameter.add_(torch.where(parameter < 0, -0.05, 0.05))
    args = arguments(transformers.TrainingArguments, folder, {"max_steps": 20, "save_strategy": "no", **settings})
    trainer = transformers.Trainer(model=model, args=args, train_dataset=rows())

    class Freezing(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == freeze_at:
                self.kept = [each.detach().clone() for each in model.parameters()]

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if freeze_at is not None and state.global_step > freeze_at:
                for each, kept in zip(model.parameters(), self.kept, strict=True):
                    each.data.copy_(kept)

    trainer.add_callback(Freezing())
    return watch(trainer, on_failure="warn", checks=["moved"])


@pytest.mark.parametrize("which", ["", "norm"])
def test_steps_that_bfloat16_cannot_show_are_no_error(launcher: Launcher, which: str, tmp_path: Path) -> None:
    (rank,) = launcher(train, str(tmp_path), which, strategy="single", **SMALL).values
    assert rank["errors"] == []
    assert [each[:3] for each in rank["said"]] == [("moved", 4, "odd"), ("moved", 9, "odd")]  # each once
    (later, at_first) = (each[3] for each in rank["said"])
    assert "for two looks in succession no trainable one has changed, with a learning rate that is not 0" in later
    assert f"8 steps were made with gradients and a learning rate, {TOO_SMALL}" in at_first
    assert f", {TOO_SMALL}" in later


@pytest.mark.parametrize("settings", [LARGE, {**LARGE, "optim": "sgd", "learning_rate": 1.0}], ids=["adamw", "sgd"])
@pytest.mark.parametrize("freeze_at", [0, 3])
def test_steps_that_bfloat16_can_show_and_that_change_nothing_are_an_error(
    launcher: Launcher, freeze_at: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    (rank,) = launcher(train, str(tmp_path), "", freeze_at=freeze_at, strategy="single", **settings).values
    errors = [each for each in rank["said"] if each[2] == "error"]
    if freeze_at:
        ((check, step, _, text),) = errors
        assert (check, step) == ("moved", 16)
        assert "for two looks in succession no trainable one has changed" in text
    else:
        assert [each[:2] for each in errors] == [("moved", 4), ("moved", 8)]
        assert "none of the 27 changed: does the optimizer have them, and does it step?. 8 steps" in errors[1][3]
    assert "too small" not in str(errors)


@pytest.mark.parametrize(
    ("dtype", "size", "rate", "shows"),
    [
        ("float32", 1.0, 1e-6, True),
        ("float32", 1.0, 1e-8, False),
        ("bfloat16", 1.0, 1e-2, False),
        ("bfloat16", 1.0, 2e-2, True),
        ("bfloat16", 0.02, 1e-4, False),
        ("bfloat16", 0.02, 1e-3, True),
        ("float16", 1.0, 1e-3, False),
        ("float16", 1.0, 3e-3, True),
    ],
)
def test_which_steps_a_type_shows(dtype: str, size: float, rate: float, shows: bool) -> None:
    import torch

    from pytest_trlcompat.checks.parameters import steps_show

    model = torch.nn.Linear(8, 8, bias=False).to(getattr(torch, dtype))
    torch.nn.init.constant_(model.weight, size)
    assert steps_show(model, torch.optim.AdamW(model.parameters(), lr=rate), None) is shows
    # The root mean square of the 64 elements of a gradient of norm 4 is a half.
    descent = torch.optim.SGD(model.parameters(), lr=2 * rate)
    assert steps_show(model, descent, 4.0) is shows
    assert steps_show(model, descent, None) is False
