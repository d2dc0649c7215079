"""Cure of ``fsdp2-rounded-outputs``: under FSDP2 a model returns what it has computed, not rounded to bfloat16.

In mixed precision Accelerate gives FSDP2 a policy with an ``output_dtype``, so that every unit, and the root after all
others, casts what it returns to bfloat16 or float16. FSDP1 casts nothing, and under DDP outputs come in float32. Logits
lose nothing by it, which a matrix product has rounded already; but a model computes its loss in float32, and newer
releases of TRL have theirs return log-probabilities: of one of -4 bfloat16 keeps steps of 1/64, in the ratio, the KL
and the gradient, and no error tells. The cure shards with a policy that has no ``output_dtype``, as FSDP2's default has
none.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import FSDP2, Condition, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.errors import CureError
from pytest_trlcompat.trainers.curing.patching import PatchPoint, replaced_in
from pytest_trlcompat.trainers.curing.upstream import points_of

__all__ = ["FSDP2OutputsMixin", "outputs_as_computed", "rounds_outputs"]

PREPARE_FSDP2_CALLED = PatchPoint("accelerate.accelerator:fsdp2_prepare_model", ">=1.6")  # by Accelerator.prepare


def rounds_outputs(policy: Any) -> bool:
    """Whether a mixed precision policy makes a model return what it has computed in the low precision of its layers.

    A policy whose ``output_dtype`` is another one than its ``param_dtype`` was chosen by somebody, and counts as none.

    Args:
        policy: ``torch.distributed.fsdp.MixedPrecisionPolicy`` of FSDP2; FSDP1's has no such dtype, ``None`` neither.
    """
    dtype = getattr(policy, "output_dtype", None)
    return dtype is not None and dtype.itemsize < 4 and dtype == policy.param_dtype


@contextmanager
def outputs_as_computed(plugin: Any) -> Iterator[None]:
    """Let what is sharded meanwhile with Accelerate's FSDP ``plugin`` return its outputs as it computes them.

    The plugin is afterwards as it was. Does nothing for a policy that rounds none, see :func:`rounds_outputs`.
    """
    policy = plugin.mixed_precision_policy
    if not rounds_outputs(policy):
        yield
        return
    plugin.mixed_precision_policy = dataclasses.replace(policy, output_dtype=None)
    try:
        yield
    finally:
        plugin.mixed_precision_policy = policy


class FSDP2OutputsMixin(Cure):
    """Gives any ``transformers.Trainer`` what its models compute, in mixed precision under FSDP2.

    It acts where Accelerate or TRL shards a model, for this trainer alone: the policy and the reference model. Does
    nothing where the policy's ``output_dtype`` is not the low precision in which layers compute.
    """

    _kinds: ClassVar = {
        "trainer": ("FSDPSyncRefModelMixin", "its __init__ calls this one's"),
        "grpo": ("FSDPSyncRefModelMixin", "its __init__ calls this one's"),
    }
    _points: ClassVar[patch_points.Points] = (
        patch_points.TRAIN,
        patch_points.trainer_method("evaluation_loop"),
        patch_points.PREPARE_FSDP,
        patch_points.PREPARE_FSDP2,
        PREPARE_FSDP2_CALLED,
    )
    _stands_before: ClassVar = {"FSDPReferenceModelMixin": "it shards the reference model when the trainer is made"}

    _needed: ClassVar = (FSDP2,)
    accelerator: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _sharding_as_computed(type(self)):
            super().__init__(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with _sharding_as_computed(type(self)):
            return super().train(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:  # shards a model that was not trained before
        upstream: Any = super()
        with _sharding_as_computed(type(self)):
            return upstream.evaluation_loop(*args, **kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        return under(trainer, "Accelerate has FSDP2 round what models return", *cls._needed, _ROUNDED)


def _is_rounded(trainer: Any) -> bool:
    return rounds_outputs(trainer.accelerator.state.fsdp_plugin.mixed_precision_policy)


_ROUNDED = Condition("in mixed precision", "FSDP2's policy rounds no outputs", _is_rounded)


@contextmanager
def _sharding_as_computed(trainer_class: type) -> Iterator[None]:
    points = (
        # Accelerator.prepare calls the name that its module has imported; `fsdp_ref_model` calls the function itself.
        PREPARE_FSDP2_CALLED,
        patch_points.PREPARE_FSDP2,
        *points_of(trainer_class, patch_points.PREPARE_FSDP),
    )
    with replaced_in(points, _as_computed, FSDP2OutputsMixin.__name__):
        yield


def _as_computed(prepare: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(prepare)
    def prepared(*args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(prepare).bind(*args, **kwargs).arguments
        if "accelerator" not in arguments:
            raise CureError(
                "FSDP2OutputsMixin",
                expected=f"the argument accelerator of {prepare.__module__}:{prepare.__qualname__}",
                seen=f"it was given {', '.join(arguments)}",
                packages=("accelerate", "trl"),
            )
        plugin = arguments["accelerator"].state.fsdp_plugin
        with outputs_as_computed(plugin):
            return prepare(*args, **kwargs)

    return prepared
