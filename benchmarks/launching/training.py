"""The training that every way of launching runs: the suites' tiny Qwen2, three steps of TRL's own GRPOTrainer.

Imports the stack only inside functions.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["MODEL", "train", "train_here"]

MODEL = "TRLCOMPAT_BENCH_MODEL"
"""The variable with the folder of the tiny model, for processes of other launchers."""


def train(model: TinyModel, steps: int = 3) -> list[float]:
    """The losses of a training, which must be the same however it is launched."""
    from transformers.generation import GenerationMixin

    from suites.in_rank import grpo

    generate = GenerationMixin.generate
    try:
        grpo.fix_completions(model.vocab_size)
        trainer = grpo.build_trainer("upstream", model, max_steps=steps)
        trainer.train()
    finally:
        GenerationMixin.generate = generate  # some processes live on
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_here() -> list[float]:
    """The same in a process that was not started by us."""
    from pytest_trlcompat.tiny import qwen2

    return train(qwen2(directory=os.environ[MODEL]))
