"""Run a training function in a rank, and record its batches, losses, gradient norms and weights.

Each ``transformers.Trainer`` that the function makes is recorded, TRL's among them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from pytest_trlcompat._due import Account

__all__ = ["NothingTrained", "Training", "load", "place_of", "record"]


_SIGNALS = ("labels", "advantages")
"""Parts of batches that may explain why no weight changed."""


class NothingTrained(RuntimeError):
    """The function trained no ``transformers.Trainer``, so that nothing can be compared."""


@dataclass
class Training:
    """One call of ``train`` of a Trainer.

    Attributes:
        inputs: for each step, the sorted digests of the rows of all ranks, by part of its batches.
        logs: ``loss`` and ``grad_norm`` of each step, as they are logged.
        weights: at the end, by the plain model's names.
        dropout: whether the model draws random numbers when it is trained.
        moved: names of trained weights that differ from what they were at the beginning.
        rate: largest learning rate of a step.
        labels: how many labels are not -100, over all ranks; ``None`` where no batch had any.
        advantage: largest absolute advantage over all ranks; ``None`` where no batch had any.
    """

    inputs: list[dict[str, list[str]]] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)
    dropout: bool = False
    moved: list[str] = field(default_factory=list)
    rate: float = 0.0
    labels: int | None = None
    advantage: float | None = None

    def shortfall(self) -> str:
        """Why a comparison with this training would show nothing; empty where it is fit to compare."""
        if not self.inputs:
            return "no step of the optimizer was made (look at max_steps, num_train_epochs and the number of rows)"
        if not self.weights:
            return "no parameter requires a gradient"
        if len(self.logs) != len(self.inputs):
            return f"of {len(self.inputs)} steps {len(self.logs)} logged a loss"
        numbers = {
            f"{name} (step {step})": math.isfinite(value)
            for step, logged in enumerate(self.logs)
            for name, value in logged.items()
        }
        numbers |= {f"weight {name}": bool(value.isfinite().all()) for name, value in self.weights.items()}
        account = Account("numbers", numbers)
        for name, is_finite in numbers.items():
            if is_finite:
                account.meet(name)
            else:
                account.refuse(name, "is not finite")
        if not account.is_complete:
            return account.shortfall() + ("; every label is masked (-100)" if self.labels == 0 else "")
        return "" if self.moved else f"no trained weight changed: {self._why_still()}"

    def _why_still(self) -> str:
        """Why no weight changed: the first of the possible causes that was seen."""
        if self.rate == 0:
            return "the learning rate is 0 in every step"
        if self.labels == 0:
            return "every label is masked (-100)"
        if self.advantage == 0:
            return "every advantage is 0, as where all rewards of each group are equal"
        norms = [logged["grad_norm"] for logged in self.logs if "grad_norm" in logged]
        if norms and not any(norms):
            return "every gradient is 0"
        return "the reason cannot be told from learning rates, labels, advantages and gradient norms"


def record(payload: bytes, path: str, accumulate: int = 1, seed: int | None = None) -> list[str]:
    """Run a training function, and save what was seen.

    Args:
        payload: the function and its arguments, pickled.
        path: where the first rank saves a list of :class:`Training`.
        accumulate: factor of the batches over which gradients are accumulated: one process then trains on the rows of
            as many ranks.
        seed: changes each weight by -1, 0 or 1 unit in its last place when a training begins; ``None`` does not.

    Returns:
        On the first rank, the reason for each training that cannot be compared.

    Raises:
        NothingTrained: the function trained no ``transformers.Trainer``.
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
        _combine(training)
    if _rank() != 0:
        return []
    torch.save([vars(training) for training in trainings], path)
    shortfalls = [training.shortfall() for training in trainings]
    return [f"{place_of(number, len(trainings))}{text}" for number, text in enumerate(shortfalls) if text]


def place_of(number: int, trainings: int) -> str:
    """The beginning of a text about one of several trainings; empty where there is only one."""
    return f"training {number}, " if trainings > 1 else ""


def load(path: str) -> list[Training]:
    """What :func:`record` has saved."""
    import torch

    return [Training(**fields) for fields in torch.load(path, weights_only=True)]


@contextlib.contextmanager
def _watched(trainings: list[Training], accumulate: int, seed: int | None) -> Iterator[None]:
    import transformers

    build = transformers.Trainer.__init__
    # Arguments that two trainers share are changed once.
    changed_configs: list[Any] = []

    @functools.wraps(build)
    def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
        config = inspect.signature(build).bind(trainer, *args, **kwargs).arguments.get("args")
        if config is not None and not any(config is known for known in changed_configs):
            changed_configs.append(config)
            config.gradient_accumulation_steps *= accumulate
        build(trainer, *args, **kwargs)
        settings = trainer.args
        settings.logging_strategy, settings.logging_steps = transformers.trainer_utils.IntervalStrategy.STEPS, 1
        # With the filter Transformers logs another number where a loss is NaN.
        settings.logging_nan_inf_filter = False
        trainer.add_callback(_callback(trainer, trainings, seed))

    transformers.Trainer.__init__ = init
    try:
        yield
    finally:
        transformers.Trainer.__init__ = build


def _callback(trainer: Any, trainings: list[Training], seed: int | None) -> Any:
    from transformers import TrainerCallback

    from pytest_trlcompat.checks.parameters import WeightsBefore

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
            self.before = WeightsBefore(trainer.model_wrapped)
            compute_loss = trainer.compute_loss

            @functools.wraps(compute_loss)
            def seen(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                if model.training:
                    _note_signals(self.training, inputs)
                    for name, rows in _digests(inputs).items():
                        self.step.setdefault(name, []).extend(rows)
                return compute_loss(model, inputs, *args, **kwargs)

            trainer.compute_loss = seen

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rates = [float(group["lr"]) for group in trainer.optimizer.param_groups]
            self.training.rate = max([self.training.rate, *rates])

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
            self.training.moved = sorted(self.before.moved(trainer.model_wrapped) & set(self.training.weights))

    return Watch()


def _note_signals(training: Training, inputs: Any) -> None:
    labels, advantages = (inputs.get(name) if isinstance(inputs, Mapping) else None for name in _SIGNALS)
    if labels is not None and not labels.is_floating_point():
        training.labels = (training.labels or 0) + int((labels != -100).sum())
    if advantages is not None and advantages.numel():
        training.advantage = max(training.advantage or 0.0, float(advantages.detach().abs().max()))


def _combine(training: Training) -> None:
    """Join what ranks recorded of their shards and batches. Collective where there are several."""
    rank_reports = _of_ranks((training.moved, training.labels, training.advantage))
    training.moved = sorted({name for moved, _, _ in rank_reports for name in moved})
    labels = [number for _, number, _ in rank_reports if number is not None]
    advantages = [largest for _, _, largest in rank_reports if largest is not None]
    training.labels = sum(labels) if labels else None
    training.advantage = max(advantages) if advantages else None


def _weights(trainer: Any) -> dict[str, Any]:
    from pytest_trlcompat.checks._models import named_parameters, whole_tensors

    model = trainer.model_wrapped
    trained = {name for name, parameter in named_parameters(model) if parameter.requires_grad}
    return {name: tensor.detach().float().cpu().clone() for name, _, tensor in whole_tensors(model) if name in trained}


def _digests(inputs: Any) -> dict[str, list[str]]:
    """Digests of the rows of each integer tensor, such as tokens and masks."""
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
    return any(layers) or float(getattr(getattr(model, "config", None), "attention_dropout", 0.0) or 0.0) > 0


def _of_ranks(mine: Any) -> list[Any]:
    import torch.distributed as dist

    objects: list[Any] = [mine]
    if dist.is_available() and dist.is_initialized():
        objects = [None] * dist.get_world_size()
        dist.all_gather_object(objects, mine)
    return objects


def _of_all_ranks(mine: dict[str, list[str]]) -> dict[str, list[str]]:
    steps = _of_ranks(mine)
    names = {name for step in steps for name in step}
    return {name: sorted(row for step in steps for row in step.get(name, ())) for name in sorted(names)}


def _rank() -> int:
    import torch.distributed as dist

    return int(dist.get_rank()) if dist.is_available() and dist.is_initialized() else 0
