"""Distillation bodies that the suites launch: they run inside the ranks and return plain numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.accelerator import artefacts

from . import grpo

if TYPE_CHECKING:
    from pytest_trlcompat.tiny import TinyModel

__all__ = ["load_teacher", "train"]

_SETTINGS: Mapping[str, Any] = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0}


def load_teacher(model: TinyModel) -> Any:
    """Another model of the same sizes: from the policy itself there would be nothing to learn."""
    other = dataclasses.replace(model, seed=model.seed + 1)
    return grpo.load_policy(other)


def train(subject: str, model: TinyModel) -> dict[str, Any]:
    """Distil for three steps, on completions that depend on the global row alone.

    Returns:
        ``losses`` and ``entropies``: as logged; ``failure``.
    """
    grpo.fix_completions(model.vocab_size)
    trainer = None
    try:
        arguments = {"teacher_model": load_teacher(model)}
        trainer = grpo.build_trainer(subject, model, arguments=arguments, name="Distillation", **_SETTINGS)
        trainer.train()
        failure = None
    except Exception as error:
        failure = artefacts.error_text(error)
    history = [] if trainer is None else trainer.state.log_history
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "entropies": [entry["entropy"] for entry in history if "entropy" in entry],
        "failure": failure,
    }
