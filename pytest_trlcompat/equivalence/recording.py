"""A training function, run in a rank and watched: what it trains on, its losses, gradient norms and weights.

What is watched are the ``transformers.Trainer`` that the function makes, TRL's among them. Imports the stack inside
functions.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

__all__ = ["NothingTrained", "Training", "load", "record"]


class NothingTrained(RuntimeError):
    """The function trained no ``transformers.Trainer``, so that nothing can be compared."""


@dataclass
class Training:
    """One call of ``train`` of a Trainer.

    Attributes:
        inputs: for each step, what each part of its batches holds: a digest of each row, sorted, of all ranks.
        logs: ``loss`` and ``grad_norm`` of each step, as they are logged.
        weights: at the end, by the plain model's names.
        dropout: whether the model draws random numbers when it is trained.
    """

    inputs: list[dict[str, list[str]]] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)
    dropout: bool = False


def record(payload: bytes, path: str, accumulate: int = 1, seed: int | None = None) -> None:
    """Run a training function, and save what was seen.

    Args:
        payload: the function and its arguments, pickled.
        path: where the first rank saves a list of :class:`Training`.
        accumulate: by how much gradients are accumulated over more batches than the function says: one process then
            trains on what as many ranks train on.
        seed: changes each weight by -1, 0 or 1 unit in its last place when a training begins; ``None`` does not.

    Raises:
        NothingTrained: see there.
    """
    import torch

    function, args, kwargs = cloudpickle.loads(payload)  # noqa: TID251 - of the test process
    trainings: list[Training] = []
    with _watched(trainings, accumulate, seed):
        function(*args, **kwargs)
    if not trainings:
        raise NothingTrained(
            "the function trained no transformers.Trainer: nothing can be compared of a loop of one's own, which TRL's "
            "PPOTrainer has, too; compare what it returns by a launch under each strategy"
        )
    for training in trainings:
        training.inputs = [_of_all_ranks(step) for step in training.inputs]
    if _rank() == 0:
        torch.save([vars(training) for training in trainings], path)


def load(path: str) -> list[Training]:
    """What :func:`record` has saved."""
    import torch

    return [Training(**fields) for fields in torch.load(path, weights_only=True)]


@contextlib.contextmanager
def _watched(trainings: list[Training], accumulate: int, seed: int | None) -> Iterator[None]:
    import transformers

    build = transformers.Trainer.__init__
    seen: list[Any] = []  # arguments that two trainers share are changed once

    @functools.wraps(build)
    def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(build).bind(trainer, *args, **kwargs).arguments.get("args")
        if given is not None and not any(given is each for each in seen):
            seen.append(given)
            given.gradient_accumulation_steps *= accumulate
        build(trainer, *args, **kwargs)
        settings = trainer.args
        settings.logging_strategy, settings.logging_steps = transformers.trainer_utils.IntervalStrategy.STEPS, 1
        trainer.add_callback(_callback(trainer, trainings, seed))

    transformers.Trainer.__init__ = init
    try:
        yield
    finally:
        transformers.Trainer.__init__ = build


def _callback(trainer: Any, trainings: list[Training], seed: int | None) -> Any:
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        """Keeps a :class:`Training` for each call of ``train``."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.training = Training(dropout=_has_dropout(trainer.model))
            self.step: dict[str, list[str]] = {}
            self.logged = len(state.log_history)
            trainings.append(self.training)
            if seed is not None:
                from pytest_trlcompat.conformance.comparison import change

                change(trainer.model, seed)
            compute_loss = trainer.compute_loss

            @functools.wraps(compute_loss)
            def seen(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                if model.training:
                    for name, rows in _digests(inputs).items():
                        self.step.setdefault(name, []).extend(rows)
                return compute_loss(model, inputs, *args, **kwargs)

            trainer.compute_loss = seen

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.training.inputs.append(self.step)
            self.step = {}

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            del trainer.compute_loss
            self.training.logs = [
                {name: float(entry[name]) for name in ("loss", "grad_norm") if name in entry}
                for entry in state.log_history[self.logged :]
                if "loss" in entry
            ]
            self.training.weights = _weights(trainer)

    return Watch()


def _weights(trainer: Any) -> dict[str, Any]:
    from pytest_trlcompat.checks._models import named_parameters, whole_tensors

    model = trainer.model_wrapped
    trained = {name for name, parameter in named_parameters(model) if parameter.requires_grad}
    return {name: tensor.detach().float().cpu().clone() for name, _, tensor in whole_tensors(model) if name in trained}


def _digests(inputs: Any) -> dict[str, list[str]]:
    """Of each tensor of numbers without a fraction, such as tokens and masks, a digest of each row."""
    if not isinstance(inputs, Mapping):
        return {}
    return {
        name: [hashlib.blake2b(row.contiguous().numpy().tobytes(), digest_size=8).hexdigest() for row in value.cpu()]
        for name, value in inputs.items()
        if hasattr(value, "is_floating_point") and not value.is_floating_point() and value.dim() > 1
    }


def _has_dropout(model: Any) -> bool:
    from torch import nn

    layers = (module.p > 0 for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd))
    return any(layers) or float(getattr(model.config, "attention_dropout", 0.0) or 0.0) > 0


def _of_all_ranks(mine: dict[str, list[str]]) -> dict[str, list[str]]:
    import torch.distributed as dist

    every: list[Any] = [mine]
    if dist.is_available() and dist.is_initialized():
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
    names = {name for step in every for name in step}
    return {name: sorted(row for step in every for row in step.get(name, ())) for name in sorted(names)}


def _rank() -> int:
    import torch.distributed as dist

    return int(dist.get_rank()) if dist.is_available() and dist.is_initialized() else 0
