"""Cure of ``lora-zero3-biases``: the gradient of a bias whose weight is frozen, under ZeRO-3.

DeepSpeed's linear layer looks at the number of dimensions where it computes the weight's gradient, and needs it for the
bias's as well: ``cannot access local variable 'dim'``. So an adapter with ``bias="lora_only"`` or ``bias="all"`` cannot
be trained where DeepSpeed's layer takes the place of PyTorch's. The cure adds the bias's gradient itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch.utils.weak import WeakIdKeyDictionary

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import ZERO3, Condition, installed, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.patching import PatchPoint, expected, extended

__all__ = ["ZeRO3BiasesMixin"]

# Right from 0.17.3 on, so that nothing is changed there.
ZERO3_LINEAR_BACKWARD = PatchPoint("deepspeed.runtime.zero.linear:LinearFunctionForZeroStage3.backward", "<0.17.3")


class ZeRO3BiasesMixin(Cure):
    """Lets a subclass of ``transformers.Trainer`` train biases of frozen weights under ZeRO-3.

    It knows by trying: DeepSpeed's own gradients are taken where it has them. Layers of other models than the
    trainer's are left alone.
    """

    _kinds: ClassVar = {
        "trainer": ("ShiftedCountMixin", "neither calls the other; it was measured here"),
        "grpo": ("ZeRO3LoraCheckpointingMixin", "neither calls the other; cures of one topic stand together"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.TRAIN, ZERO3_LINEAR_BACKWARD)
    _needed: ClassVar = (ZERO3,)
    accelerator: Any
    model: Any

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if ZERO3.holds(self) and expected(ZERO3_LINEAR_BACKWARD):
            _cured.update(dict.fromkeys(self.model.parameters(), True))
            extended(ZERO3_LINEAR_BACKWARD, _working, ZeRO3BiasesMixin.__name__)
        return super().train(*args, **kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if not installed("deepspeed"):
            return Activity(False, "DeepSpeed is not installed")
        if not expected(ZERO3_LINEAR_BACKWARD):
            return Activity(False, "DeepSpeed counts dimensions in any case")
        return under(trainer, "DeepSpeed counts dimensions only for a weight's gradient", *cls._needed, _BIASES)


def _trains_biases(trainer: Any) -> bool:
    pairs = ((getattr(module, "weight", None), getattr(module, "bias", None)) for module in trainer.model.modules())
    return any(
        getattr(bias, "requires_grad", False) and not getattr(weight, "requires_grad", True) for weight, bias in pairs
    )


_BIASES = Condition("with biases of frozen weights", "no bias of a frozen weight is trained", _trains_biases)


# By identity, because tensors compare element by element; weak, so that a model can be freed.
_cured = WeakIdKeyDictionary()
"""Parameters of the layers that get their gradients here, for a backward pass in whichever thread."""


class _WithoutBias:
    """The context of a backward pass, as it was if the layer had no bias."""

    def __init__(self, context: Any) -> None:
        self._context = context

    @property
    def saved_tensors(self) -> tuple[Any, Any, None]:
        inputs, weight, _bias = self._context.saved_tensors
        return inputs, weight, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _working(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def backward(context: Any, grad_output: Any) -> Any:
        try:
            return upstream(context, grad_output)
        except UnboundLocalError as error:
            _inputs, weight, _bias = context.saved_tensors
            # The variable that DeepSpeed's backward reads for a bias and sets for a weight's gradient alone.
            if "'dim'" not in str(error) or weight not in _cured:
                raise
        grad_input, grad_weight, _none = upstream(_WithoutBias(context), grad_output)
        # (..., out_features) to (out_features,), the bias's shape.
        return grad_input, grad_weight, grad_output.sum(tuple(range(grad_output.dim() - 1)))

    return backward
