"""TrainCheck's published silent errors that run here: which the checks catch, in which step, and in what words.

docs/explanation/silent-errors.md lists all of them, those that are not caught as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.launch import Launcher

from . import silent_bodies as bodies
from .checks_bodies import options

pytest.importorskip("trl")

CASES: dict[str, tuple[Any, str, str, str, int, str]] = {
    # name: body, strategy, kind, check, step, words
    "deepspeed-1801": (
        bodies.deepspeed_1801,
        "ddp",
        "error",
        "ranks",
        1,
        "they differ in 5 (model.layers.0.input_layernorm",
    ),
    "pytorch-104336": (bodies.pytorch_104336, "ddp", "error", "ranks", 1, "rank 0's value is not that of rank 1"),
    "x-jxmnop-ddp-out-of-sync": (bodies.x_jxmnop, "ddp", "error", "ranks", 1, "rank 0's value is not that of rank 1"),
    "pytorch-84803": (bodies.pytorch_84803, "ddp", "error", "ranks", 4, "rank 0's value is not that of rank 1"),
    "accelerate-2665": (
        bodies.accelerate_2665,
        "single",
        "error",
        "trainable",
        0,
        "of its 27 tensors none is among them",
    ),
    "stackoverflow-60335387": (
        bodies.stackoverflow_60335387,
        "single",
        "error",
        "steps",
        3,
        "16 parameters still had those of the step before when the next backward began, 2 times in succession",
    ),
    "pytorch-115607": (bodies.pytorch_115607, "single", "error", "moved", 16, "for two looks in succession"),
    "mmpretrain-702": (
        bodies.mmpretrain_702,
        "single",
        "odd",
        "forward",
        1,
        "the model is in eval mode while it trains",
    ),
    "lightning-thunder-725": (
        bodies.lightning_thunder_725,
        "single",
        "odd",
        "forward",
        1,
        "mixed precision in torch.bfloat16 was asked for, and the linear layers returned ['float32'] alone",
    ),
    "transformers-33844": (
        bodies.transformers_33844,
        "single",
        "error",
        "repeat",
        0,
        "expected the same output for the same batch in eval mode",
    ),
    "pytorch-forum-84911": (
        bodies.pytorch_forum_84911,
        "single",
        "odd",
        "trainable",
        0,
        "of the 27 parameters nothing but normalisation requires a gradient: 5 (",
    ),
    "stackoverflow-67180955": (
        bodies.stackoverflow_67180955,
        "single",
        "odd",
        "data",
        4,
        "on rank 0 each of the first 4 came twice in succession",
    ),
    "the same data on every rank": (
        bodies.same_data_on_every_rank,
        "ddp",
        "odd",
        "data",
        4,
        "ranks 0, 1 of 2 had the same 4",
    ),
    "a scheduler stepped twice": (
        bodies.scheduler_stepped_twice,
        "single",
        "odd",
        "schedule",
        4,
        "the scheduler made 8 steps in 4 of the optimizer",
    ),
}


def outcomes(folder: str, body: Any) -> dict[str, Any]:
    return dict(body(folder))


@pytest.mark.parametrize("name", CASES)
def test_a_silent_error_is_caught(launcher: Launcher, name: str, tmp_path: Path) -> None:
    body, strategy, kind, check, step, words = CASES[name]
    ranks = launcher(outcomes, str(tmp_path), body, strategy=strategy, options=options(strategy)).values
    for rank in ranks:
        (found,) = (each for each in rank["said"] if each[0] == check)
        assert found[1:3] == (step, kind)
        assert words in found[3]
