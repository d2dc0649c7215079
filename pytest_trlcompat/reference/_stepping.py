"""From a loss to new weights: gradients, clipping, the learning rate's schedule, and the optimizer's step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from pytest_trlcompat.reference import optimizer
from pytest_trlcompat.reference.settings import OptimizerSettings

__all__ = ["Stepped", "Stepper", "detached"]

Record = TypeVar("Record")


@dataclass(frozen=True)
class Stepped:
    """What an optimizer step makes of a loss; tensors by the parameter's name.

    Attributes:
        gradients: before clipping; zeros where the loss does not depend on a parameter.
        grad_norm: a scalar, before clipping.
        clipped_gradients: what the optimizer gets.
        learning_rate: of this step.
        weights: after it.
    """

    gradients: dict[str, Tensor]
    grad_norm: Tensor
    clipped_gradients: dict[str, Tensor]
    learning_rate: float
    weights: dict[str, Tensor]


class Stepper:
    """Trains a model in place, and remembers what lasts from one optimizer step to the next."""

    def __init__(self, model: Any, settings: OptimizerSettings) -> None:
        self.model, self.settings = model, settings
        self.decayed = optimizer.decayed_parameters(model)
        self.state = optimizer.AdamWState()
        self.steps = 0

    def step(self, loss: Tensor, rate: float) -> Stepped:
        """One optimizer step with a learning rate."""
        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        gradient_list = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        gradients = {
            # The loss does not reach it: its gradient is 0, and its weight decays nevertheless.
            name: torch.zeros_like(parameter) if gradient is None else gradient
            for (name, parameter), gradient in zip(trained.items(), gradient_list, strict=True)
        }
        clipped = optimizer.clip_gradients(gradients, self.settings.max_grad_norm)
        weights = self._updated({name: parameter.detach() for name, parameter in trained.items()}, clipped, rate)
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(weights[name])
        self.steps += 1
        return Stepped(gradients, optimizer.gradient_norm(gradients), clipped, rate, weights)

    def learning_rate(self, step: int, total: int) -> float:
        """That of a step of the schedule, 0 for the first of ``total``."""
        settings = self.settings
        warmup_steps = settings.warmup_steps
        warmup = math.ceil(warmup_steps * total) if warmup_steps < 1 else int(warmup_steps)
        factor = optimizer.learning_rate_factor(settings.lr_scheduler_type, step, total=total, warmup=warmup)
        return settings.learning_rate * factor

    def _updated(self, weights: dict[str, Tensor], gradients: dict[str, Tensor], rate: float) -> dict[str, Tensor]:
        settings = self.settings
        if settings.optim == "sgd":
            decay = settings.weight_decay
            return optimizer.sgd_step(weights, gradients, lr=rate, weight_decay=decay, decayed=self.decayed)
        after, self.state = optimizer.adamw_step(
            weights,
            gradients,
            self.state,
            lr=rate,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_epsilon,
            weight_decay=settings.weight_decay,
            decayed=self.decayed,
        )
        return after


def detached(record: Record) -> Record:
    """A dataclass instance with its tensors detached."""
    values = {name: value.detach() for name, value in vars(record).items() if isinstance(value, Tensor)}
    return replace(record, **values)  # type: ignore[type-var]
