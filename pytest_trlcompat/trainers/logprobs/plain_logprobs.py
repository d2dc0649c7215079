"""Cure of ``grpo-needs-triton``: log-probabilities where there is no Triton.

GRPO may compute them from hidden states and the output head in Triton kernels, and call ``None`` where Triton is not
installed, as beside CPU builds of PyTorch and on a Mac: ``'NoneType' object has no attribute 'apply'``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from importlib import import_module
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.cure import Activity, Cure

__all__ = ["PlainLogProbsMixin", "log_probs_without_triton"]

_MODULE = "trl.trainer.utils"
_NAME = "_ChunkedLogProbFunction"
_LOCK = threading.Lock()


class PlainLogProbsMixin(Cure):
    """Lets a subclass of ``trl.GRPOTrainer`` compute log-probabilities without Triton.

    It knows by the kernel that is ``None``. The same numbers are then computed by PyTorch's own operations, with whole
    rows of logits in memory, which the kernels save. Elsewhere nothing is changed.
    """

    _kinds: ClassVar = {
        "grpo": ("VLLMRestartMixin", "neither calls the other; it was measured here"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.PER_TOKEN_LOGPS_AND_ENTROPIES,)
    _stands_before: ClassVar = {
        "LogitsToKeepMixin": "that one asks whether TRL has the method that this one defines in front of every TRL",
    }

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        with log_probs_without_triton():
            return upstream._get_per_token_logps_and_entropies(*args, **kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if _misses_triton():
            return Activity(True, "TRL computes log-probabilities in Triton, which is not installed")
        return Activity(False, "TRL computes log-probabilities without Triton, or Triton is installed")


class _FunctionByContext:
    """Stands where TRL has ``None``, for good: a function in contexts that asked for it, ``None`` in all others."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.current: ContextVar[Any] = ContextVar(_NAME, default=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.current.get(), name)


@contextlib.contextmanager
def log_probs_without_triton() -> Iterator[None]:
    """Let TRL find a function where it has none for want of Triton, for whoever calls it in this context."""
    if not _misses_triton():
        yield
        return
    utils: Any = import_module(_MODULE)
    with _LOCK:
        if getattr(utils, _NAME) is None:
            setattr(utils, _NAME, _FunctionByContext(_function(utils)))
        by_context = getattr(utils, _NAME)
    token = by_context.current.set(by_context.function)
    try:
        yield
    finally:
        by_context.current.reset(token)


def _misses_triton() -> bool:
    function = getattr(import_module(_MODULE), _NAME, True)
    return function is None or isinstance(function, _FunctionByContext)


def _function(utils: Any) -> Any:
    """What stands for TRL's ``torch.autograd.Function``; its arguments and results are that one's.

    The backward pass computes everything again: under ZeRO-3 the output head is whole only while TRL gathers it.
    """
    import torch

    class PlainLogProbs(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any,
            hidden: torch.Tensor,
            weight: torch.Tensor,
            bias: torch.Tensor | None,
            targets: torch.Tensor,
            temperature: float,
            chunk_size: int,
            softcap: float | None = None,
            scale: float = 1.0,
            outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
        ) -> tuple[torch.Tensor | None, ...]:
            # So that the gradient of an output that nobody used is None, and nothing is computed for it.
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(hidden, weight, bias, targets)
            ctx.settings = (temperature, softcap, scale)
            logits = _logits(hidden, weight, bias, *ctx.settings)
            logps = logits.log_softmax(-1)
            chosen, entropy = _chosen(logps, targets), _entropy(logps)
            top = logits.argmax(-1) == targets
            optional = {
                "entropy": entropy,
                "log_sum_sq_probs": (2 * logps).logsumexp(-1),
                "mean_logits": logits.mean(-1),
                "is_top1": top,
            }
            results = {name: value if name in outputs else None for name, value in optional.items()}
            constant = [value for name, value in results.items() if name != "entropy" and value is not None]
            ctx.mark_non_differentiable(*constant)
            return (chosen, *results.values())

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
            hidden, weight, bias, targets = ctx.saved_tensors
            with utils.maybe_gather_lm_head_ctx(weight, bias), torch.enable_grad():
                inputs = [
                    None if tensor is None else tensor.detach().requires_grad_(needed)
                    for tensor, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
                ]
                logps = _logits(inputs[0], inputs[1], inputs[2], *ctx.settings).log_softmax(-1)
                values = {0: _chosen(logps, targets), 1: _entropy(logps)}
                outputs_with_gradient = [index for index in values if gradients[index] is not None]
                leaves = {i: tensor for i, tensor in enumerate(inputs) if tensor is not None and tensor.requires_grad}
                input_gradients = torch.autograd.grad(
                    [values[index] for index in outputs_with_gradient],
                    [*leaves.values()],
                    [gradients[index] for index in outputs_with_gradient],
                )
            by_place = dict(zip(leaves, input_gradients, strict=True))
            # No gradients for targets, temperature, chunk_size, softcap, scale and outputs.
            return (*(by_place.get(index) for index in range(3)), *[None] * 6)

    return PlainLogProbs


def _logits(hidden: Any, weight: Any, bias: Any, temperature: float, softcap: float | None, scale: float) -> Any:
    import torch

    logits = torch.nn.functional.linear(hidden, weight, bias).float() * scale
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    return logits / temperature


def _chosen(logps: Any, targets: Any) -> Any:
    return logps.gather(-1, targets[:, None]).squeeze(-1)


def _entropy(logps: Any) -> Any:
    return -(logps.exp() * logps).sum(-1)
