"""What conformance trainings of TRL's Trainers have in common: their plain settings, and how steps are watched.

Runs inside a rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_trlcompat.conformance.step_records import RecordedSteps, StepRecord

if TYPE_CHECKING:
    import torch

    from pytest_trlcompat.tiny import TinyModel

__all__ = [
    "PLAIN",
    "Whole",
    "conformance_model",
    "of_all_ranks",
    "own_fields",
    "trained_weights",
    "unrecorded_of",
    "watched_steps",
    "world_size",
]

Whole = Callable[[Any], "dict[str, torch.Tensor]"]
"""Gathers the trained weights of a trainer, by their names in the bare model. Called on every rank."""
PLAIN: Mapping[str, Any] = {
    "gradient_accumulation_steps": 1,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "bf16": False,
    "gradient_checkpointing": False,
    "optim": "sgd",
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "adam_epsilon": 1e-5,
    "max_grad_norm": 100.0,
    "seed": 7,
    "disable_tqdm": True,
}
"""SGD, and a bound that no gradient reaches: a wrong factor of a gradient then shows in the weights. With AdamW,
``adam_epsilon`` keeps gradients that are only rounding from becoming a whole step."""


def unrecorded_of(steps: Sequence[StepRecord]) -> dict[str, str]:
    """Why quantities of steps under a strategy are missing, by stage; for
    :func:`~pytest_trlcompat.conformance.comparison.stated`."""
    if any(step.gradients is None for step in steps):
        return {"gradients[*": "the strategy keeps gradients to itself; the weights after each step are compared"}
    return {}


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def watched_steps(trainer: Any, recording: RecordedSteps, whole: Whole | None) -> Iterator[None]:
    """Record the gradients before, and the weights after, each step of the optimizer.

    Args:
        recording: gets each step.
        whole: where it is given, no gradients are recorded.
    """
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    from transformers import TrainerCallback

    gradients: dict[str, torch.Tensor] = {}

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        gradients.clear()
        for name, parameter in trainer.model.named_parameters() if whole is None else ():
            # Where no output depends on a parameter it has no gradient: that counts as 0.
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradients[name] = gradient.detach().float().cpu().clone()

    class AfterSteps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            weights = (whole or trained_weights)(trainer)
            recording.steps.append(StepRecord(recording.trained_on, None if whole else dict(gradients), weights))

    callback = AfterSteps()
    # Before a callback that changes or saves something.
    trainer.callback_handler.callbacks.insert(0, callback)
    # For every optimizer, since the trainer makes its own only within train().
    handle = register_optimizer_step_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()
        trainer.remove_callback(callback)


def trained_weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().float().cpu().clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad
    }


@contextlib.contextmanager
def own_fields(config: Any) -> Iterator[None]:
    """Within, Transformers expects of this config only fields that it has.

    Once GRPOConfig was imported, as a launch's server has done, Transformers until 4.50 reads GRPO's fields of every
    config. That is the known issue ``trl-training-arguments``, which nobody meets who trains without GRPO.
    """
    from transformers import training_args

    names = list(getattr(training_args, "_VALID_DICT_FIELDS", []))
    known = {field.name for field in dataclasses.fields(config)}
    if names:
        training_args._VALID_DICT_FIELDS[:] = [name for name in names if name in known]
    try:
        yield
    finally:
        if names:
            training_args._VALID_DICT_FIELDS[:] = names


def of_all_ranks(mine: Any) -> list[Any]:
    """The objects of all ranks, in the order of ranks, on every rank. Collective."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


def conformance_model(directory: Path | str, seed: int = 0) -> TinyModel:
    """The model that conformance trains: one layer, with weights so large that each of them changes the loss."""
    from pytest_trlcompat import tiny

    return tiny.qwen2(initializer_range=0.3, num_hidden_layers=1, seed=seed, directory=directory)
