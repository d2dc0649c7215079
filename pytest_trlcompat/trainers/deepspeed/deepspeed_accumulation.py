"""Part of the cures of ``trainer-accumulation`` and ``grpo-gradient-accumulation``: DeepSpeed's sum of gradients.

Two things go wrong in DeepSpeed when gradients are accumulated, without an error and whoever trains:

- What ZeRO-2 accumulates is kept in one place, and another one, filled at the last micro-batch only, is asked whether
  there is something yet: each micro-batch takes the place of the one before it. A step is trained on its last
  micro-batch alone, divided as if there were all.
- The gradient of every output of the model is divided as it arrives, instead of the loss: once more for each output
  that another one was made from, as hidden states are; in one release also when ``engine.backward`` is called
  with ``scale_wrt_gas=False``, as Transformers does since it divides the loss itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from packaging.version import Version

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import ACCUMULATION, DEEPSPEED, Condition, installed, under, zero_stage
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.upstream import function_uses

if TYPE_CHECKING:
    import torch

__all__ = ["DeepSpeedAccumulationMixin", "accumulation_activity", "repair_accumulation", "synchronising"]

_LOSING = (Version("0.17.6"), Version("0.18.3"))
"""The first release of DeepSpeed that loses gradients, and the first that does not any more."""


class DeepSpeedAccumulationMixin(Cure):
    """Repairs the engine of a subclass of ``transformers.Trainer`` before its first step.

    Does nothing without DeepSpeed, and with releases of it that are right; see :func:`repair_accumulation`.
    """

    _kinds: ClassVar = {
        "trainer": ("TrainerAccumulationMixin", "its training_step calls this one's"),
        "grpo": ("GradientAccumulationMixin", "neither calls the other; it was measured here"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.TRAINING_STEP,)
    _needed: ClassVar = (DEEPSPEED,)
    accelerator: Any

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        wrapped = getattr(self.accelerator, "deepspeed_engine_wrapped", None)
        if wrapped is not None:
            repair_accumulation(wrapped.engine)
        return upstream.training_step(*args, **kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        return accumulation_activity(trainer)


def repair_accumulation(engine: Any) -> None:
    """Have a ``DeepSpeedEngine`` add up the gradients of all micro-batches, and divide the loss by ``scale_wrt_gas``.

    Changes methods of the engine and of its optimizer, as objects; a second call changes nothing. It knows by
    DeepSpeed's version whether it loses gradients, and by its code whether it divides those of outputs.
    """
    optimizer = engine.optimizer
    # A method among the attributes of the object itself is ours, from an earlier call.
    losing = hasattr(optimizer, "get_all_grad_tensors") and "get_all_grad_tensors" not in vars(optimizer)
    if losing and _loses_gradients():
        _add_up(optimizer)
    if _divides_outputs(engine):
        _divide_the_loss(engine)


_ONE_PLACE = Condition(
    "under ZeRO-1 or ZeRO-2", "neither under ZeRO-1 nor under ZeRO-2", lambda trainer: zero_stage(trainer) in (1, 2)
)
"""The stages whose optimizer keeps what is accumulated where :func:`_add_up` looks for it."""


def accumulation_activity(trainer: Any) -> Activity:
    """What :func:`repair_accumulation` comes to for a trainer, or, of ``None``, by what is installed."""
    if not installed("deepspeed"):
        return Activity(False, "DeepSpeed is not installed")
    from deepspeed import DeepSpeedEngine

    if _class_divides_outputs(DeepSpeedEngine):
        return under(trainer, "DeepSpeed divides the gradient of every output", DEEPSPEED, ACCUMULATION)
    if _loses_gradients():
        return under(trainer, "DeepSpeed keeps the last micro-batch alone", _ONE_PLACE, ACCUMULATION)
    return Activity(False, "DeepSpeed adds up gradients, and divides them once")


def synchronising(model: Any = None) -> AbstractContextManager[None]:
    """In place of ``Accelerator.no_sync``: DeepSpeed counts micro-batches itself."""
    return nullcontext()


def _loses_gradients() -> bool:
    import deepspeed

    first, cured = _LOSING
    return first <= Version(deepspeed.__version__) < cured


def _add_up(optimizer: Any) -> None:
    """Have ``get_all_grad_tensors`` return the sum so far, where DeepSpeed would put the last summand in its place."""
    last = optimizer.get_all_grad_tensors

    def summed(parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype) -> list[torch.Tensor]:
        gradients: list[torch.Tensor] = last(parameters, dtype)
        # DeepSpeed passes the list of a group's parameters, and not the group's number.
        group = next(index for index, partition in enumerate(optimizer.params_in_partition) if partition is parameters)
        so_far = optimizer.all_grad_tensors.get(group)
        if so_far is None or optimizer.averaged_gradients.get(group) is not None:
            # The first micro-batch; or gradients that DeepSpeed adds to others itself.
            return gradients
        return [accumulated.add_(gradient) for accumulated, gradient in zip(so_far, gradients, strict=True)]

    optimizer.get_all_grad_tensors = summed


def _divides_outputs(engine: Any) -> bool:
    """Whether it divides gradients of outputs and does not look, as 0.19.6 does, whether ``backward`` divides."""
    return "_backward_prologue_per_tensor" not in vars(engine) and _class_divides_outputs(type(engine))


def _class_divides_outputs(engine: type) -> bool:
    divide = getattr(engine, "_backward_prologue_per_tensor", None)
    return divide is not None and not function_uses(divide, "is_current_graph_registered")


def _divide_the_loss(engine: Any) -> None:
    backward = engine.backward

    def divided_once(loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        loss = loss / engine.gradient_accumulation_steps() if scale_wrt_gas else loss
        return backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    engine.backward = divided_once
    engine._backward_prologue_per_tensor = _as_it_is


def _as_it_is(gradient: torch.Tensor) -> torch.Tensor:
    return gradient
