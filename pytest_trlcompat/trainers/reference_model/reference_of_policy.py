"""Cure of ``grpo-reference-by-name``, ``dpo-reference-by-name``, ``kto-reference-by-name`` and
``rloo-reference-by-name``: a reference model that is the policy as it was given.

These trainers hold the policy to the model that it was before the training. Where the policy is given as an object,
TRL reads the reference model once more from the folder or the hub that the policy's config names. A policy whose
weights were changed since, by merging an adapter, say, or by resizing its embeddings, is then held to another model.
The cure gives the reference model the policy's weights as soon as the trainer has it, before it is wrapped for a
strategy.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.errors import CureError, leaving_out
from pytest_trlcompat.trainers.curing.patching import PatchPoint, expected, replaced_in

__all__ = ["ReferenceOfPolicyMixin"]

REFERENCE_CONSTRUCTORS = (
    patch_points.GRPO_CONSTRUCTOR,
    PatchPoint("trl.trainer.dpo_trainer:DPOTrainer.__init__", ">=0.29"),
    PatchPoint("trl.trainer.rloo_trainer:RLOOTrainer.__init__", ">=0.22"),
    PatchPoint("trl.experimental.kto.kto_trainer:KTOTrainer.__init__", ">=1.2,<1.8"),
    PatchPoint("trl.trainer.kto_trainer:KTOTrainer.__init__", ">=1.8"),
)


class ReferenceOfPolicyMixin(Cure):
    """Gives the reference model of a subclass of TRL's trainer of GRPO, DPO, KTO or RLOO the weights of the policy.

    The policy is the one that TRL's own ``__init__`` is called with, whatever a user's class was given; the reference
    model is the one that this call makes. A policy that was given as a name, one with an adapter, and a reference model
    that was given, are left as they are: there upstream is right, or has no reference model. Of another size, the
    reference model becomes a copy of the policy.

    Raises:
        CureError: under ZeRO-3, where the reference model is of another size: partitioned weights cannot be copied.
    """

    _kinds: ClassVar = {
        "trainer": ("FSDP2OutputsMixin", "its __init__ calls this one's"),
        "grpo": ("FSDP2OutputsMixin", "its __init__ calls this one's"),
    }
    _points: ClassVar[patch_points.Points] = REFERENCE_CONSTRUCTORS
    _policy_as_given: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with replaced_in(_constructors(type(self)), self._seeing_the_policy, ReferenceOfPolicyMixin.__name__):
            super().__init__(*args, **kwargs)

    def _seeing_the_policy(self, upstream: Callable[..., None]) -> Callable[..., None]:
        # With the parameters, which another cure may ask for.
        @functools.wraps(upstream)
        def __init__(instance: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it is one
            if instance is not self:
                upstream(instance, *args, **kwargs)
                return
            arguments = inspect.signature(upstream).bind(instance, *args, **kwargs).arguments
            policy = arguments.get("model")
            is_bare = isinstance(policy, torch.nn.Module) and not hasattr(policy, "peft_config")
            makes_reference = is_bare and arguments.get("ref_model") is None
            # By their names as they are now: an adapter that the trainer adds gives them others.
            self._policy_as_given = (policy, _tensors(policy)) if makes_reference else None
            try:
                upstream(instance, *args, **kwargs)
            finally:
                self._policy_as_given = None

        return __init__

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "ref_model" and isinstance(value, torch.nn.Module) and self._policy_as_given is not None:
            # Upstream sets it again when it is wrapped, and then it has these weights already.
            (policy, weights), self._policy_as_given = self._policy_as_given, None
            value = _with_weights_of(policy, weights, value)
        super().__setattr__(name, value)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if not _constructors(trainer_class):
            return Activity(False, "the trainer reads no reference model from where the policy was read from")
        return Activity(None, "changes something where the policy is an object that differs from what it was read from")


def _constructors(cls: type) -> tuple[PatchPoint, ...]:
    """Those of TRL's that are called when a trainer of this class is built, and that read a reference model."""
    modules = {base.__module__ for base in cls.__mro__}
    return tuple(point for point in REFERENCE_CONSTRUCTORS if point.module in modules and expected(point))


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _with_weights_of(
    policy: torch.nn.Module, weights: dict[str, torch.Tensor], reference: torch.nn.Module
) -> torch.nn.Module:
    """The reference model, or a copy of the policy where it is of another size."""
    reference_weights = _tensors(reference)
    # Under ZeRO-3 each rank compares and copies its own shards.
    partitioned = {name: tensor.ds_tensor for name, tensor in weights.items() if hasattr(tensor, "ds_tensor")}
    weights = weights | partitioned
    reference_weights |= {
        name: tensor.ds_tensor for name, tensor in reference_weights.items() if hasattr(tensor, "ds_tensor")
    }
    if {name: tensor.shape for name, tensor in weights.items()} != {
        name: tensor.shape for name, tensor in reference_weights.items()
    }:
        if partitioned:
            raise CureError(
                "ReferenceOfPolicyMixin",
                expected="a reference model with the parameters of the policy",
                seen="what the policy's config names has others, and ZeRO-3 has partitioned both",
                packages=("trl", "deepspeed"),
                remedy="Save the policy to a folder and load it from there" + leaving_out("ReferenceOfPolicyMixin"),
            )
        return copy.deepcopy(policy)
    with torch.no_grad():
        for name, parameter in reference_weights.items():
            if parameter.is_meta or weights[name].is_meta:
                # Another rank has it, and gives it to this one.
                continue
            parameter.copy_(weights[name])
    return reference
