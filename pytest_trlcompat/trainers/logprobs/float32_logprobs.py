"""Cure of ``grpo-bf16-logprobs``: log-probabilities in float32, whatever dtype the model returns its logits in.

Where the model returns logits in bfloat16 (DeepSpeed's bf16, weights in bfloat16, FSDP2's mixed precision) TRL takes
their log-softmax in bfloat16: of a log-probability of -4 there are steps of 1/64, in the ratio, the KL and the loss,
and no error tells. Under DDP, and in one process with ``bf16=True``, logits come in float32. The cure has TRL's
function compute each sequence in float32, and compute it again for the backward pass, which then keeps the logits
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.cure import Activity
from pytest_trlcompat.trainers.curing.patching import PatchPoint, expected, replaced
from pytest_trlcompat.trainers.curing.upstream import AroundGeneration

__all__ = ["Float32LogProbsMixin", "in_float32"]

# TRL 1.15 has models return log-probabilities.
SELECTIVE_LOG_SOFTMAX = patch_points.in_grpo("selective_log_softmax", ">=0.15,<1.15")
SELECTIVE_LOG_SOFTMAX_OF_UTILS = PatchPoint("trl.trainer.utils:selective_log_softmax", ">=0.15,<1.15")

_LOW = (torch.bfloat16, torch.float16)


def in_float32(selective_log_softmax: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function like the given one, which it calls with one sequence at a time, in float32.

    Args:
        selective_log_softmax: of TRL: takes logits ``(B, K, V)`` and token ids ``(B, K)``, returns log-probabilities
            ``(B, K)``. What else it is given is cut as the logits are where it is a tensor of B rows.

    Returns:
        A function of the same arguments. What is in float32 or float64 already is computed as ever.
    """

    def computed(logits: Tensor, index: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if logits.dtype not in _LOW:
            return selective_log_softmax(logits, index, *args, **kwargs)

        def of_row(row: Tensor, number: int) -> Tensor:
            more = [_cut(value, number, len(logits)) for value in args]
            named: Mapping[str, Any] = {name: _cut(value, number, len(logits)) for name, value in kwargs.items()}
            return selective_log_softmax(row.float(), index[number : number + 1], *more, **named)

        # Computed again in the backward pass, so that no copy in float32 is kept for it.
        rows = [
            # A log-softmax draws no random numbers whose state would have to be restored.
            checkpoint(of_row, logits[number : number + 1], number, use_reentrant=False, preserve_rng_state=False)
            for number in range(len(logits))
        ]
        return torch.cat(rows)

    return computed


def _cut(value: Any, number: int, rows: int) -> Any:
    return value[number : number + 1] if isinstance(value, Tensor) and value.dim() and len(value) == rows else value


class Float32LogProbsMixin(AroundGeneration):
    """Lets a subclass of ``trl.GRPOTrainer`` compute log-probabilities in float32 from logits in bfloat16.

    Does nothing for logits in float32, where TRL has its models compute log-probabilities, in float32, and where it has
    a Triton kernel for them. What ``LogitsToKeepMixin`` computes is in float32 anyway.
    """

    _kinds: ClassVar = {
        "grpo": ("LogitsToKeepMixin", "neither calls the other; cures of one topic stand together"),
    }
    _points: ClassVar[patch_points.Points] = (SELECTIVE_LOG_SOFTMAX, SELECTIVE_LOG_SOFTMAX_OF_UTILS)

    @contextmanager
    def _around_generation(self) -> Iterator[None]:
        with _log_probs_in_float32(), super()._around_generation():
            yield

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if not expected(SELECTIVE_LOG_SOFTMAX):
            return Activity(False, "TRL takes no log-softmax of logits in this release, or LogitsToKeepMixin takes it")
        if _has_kernel():
            return Activity(False, "TRL computes log-probabilities in Triton")
        return Activity(None, "by the dtype in which the model returns logits")


@contextmanager
def _log_probs_in_float32() -> Iterator[None]:
    if _has_kernel():
        yield
        return
    with (
        replaced(SELECTIVE_LOG_SOFTMAX, in_float32),
        replaced(SELECTIVE_LOG_SOFTMAX_OF_UTILS, in_float32),
    ):
        yield


def _has_kernel() -> bool:
    return getattr(import_module("trl.trainer.utils"), "_fused_logprob_entropy", None) is not None
