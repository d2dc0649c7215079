"""Cure of ``deepspeed-mixed-dtypes``: ZeRO-3 gathers parameters of two dtypes.

DeepSpeed gathers a list of parameters into buffers of which all have the dtype of the first one. With an adapter, which
PEFT makes in float32, on a model loaded in bfloat16 and without ``bf16=True``, generation ends in ``invalid tensor
type``. The cure has DeepSpeed gather those of each dtype by themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import ZERO3, Condition, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.patching import PatchPoint, expected, replaced

__all__ = ["ZeRO3MixedDtypesMixin"]

ZERO3_GATHER = PatchPoint(
    "deepspeed.runtime.zero.partition_parameters:Init._allgather_params_coalesced", "<0.19.3"
)  # right from 0.19.3 on


class ZeRO3MixedDtypesMixin(Cure):
    """Lets a subclass of ``transformers.Trainer`` gather parameters of two dtypes at once under ZeRO-3.

    Parameters of one dtype are gathered in one call, as ever. Does nothing with a DeepSpeed whose buffers have each the
    dtype of its parameter.
    """

    _kinds: ClassVar = {
        "trainer": ("ZeRO3WholeModulesMixin", "its evaluate calls this one's"),
        "grpo": ("ZeRO3WholeModulesMixin", "its evaluate calls this one's"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.TRAIN, patch_points.EVALUATE, ZERO3_GATHER)
    _needed: ClassVar = (ZERO3,)
    model: Any

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with _each_dtype_by_itself():
            return super().train(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        upstream: Any = super()
        with _each_dtype_by_itself():
            return upstream.evaluate(*args, **kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if not expected(ZERO3_GATHER):
            return Activity(False, "DeepSpeed is not installed, or gives each parameter a buffer of its own dtype")
        return under(trainer, "DeepSpeed gathers all into buffers of one dtype", *cls._needed, _TWO_DTYPES)


@contextmanager
def _each_dtype_by_itself() -> Iterator[None]:
    # `replaced` would import DeepSpeed, which trainings without it do not need.
    if ZERO3_GATHER.module not in sys.modules:
        yield
        return
    with replaced(ZERO3_GATHER, _by_dtype, ZeRO3MixedDtypesMixin.__name__):
        yield


def _by_dtype(gather: Callable[..., Any]) -> Callable[..., Any]:
    def _allgather_params_coalesced(self: Any, params: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        dtypes = dict.fromkeys(param.ds_tensor.dtype for param in params)
        if len(dtypes) < 2:
            return gather(self, params, *args, **kwargs)
        for dtype in dtypes:
            gather(self, [param for param in params if param.ds_tensor.dtype == dtype], *args, **kwargs)
        return None  # as upstream

    return _allgather_params_coalesced


_TWO_DTYPES = Condition(
    "with parameters of two dtypes",
    "all parameters have one dtype",
    lambda trainer: len({parameter.dtype for parameter in trainer.model.parameters()}) > 1,
)
