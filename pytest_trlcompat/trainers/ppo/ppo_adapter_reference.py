"""Cure of ``ppo-adapter-reference``: PPO's reference is its policy without the adapter, under DDP and FSDP.

Given an adapter and no reference model, TRL's PPO trainer switches the adapter off and calls the policy by itself. It
looks for the policy in what Accelerate wrapped: ``'DistributedDataParallel' object has no attribute 'policy'``. FSDP's
wrapper has it, but gathers the parameters of its own unit (embeddings, final norms, heads) only when it is called
itself. The cure lends DDP's wrapper the policy, and gathers FSDP's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import Condition, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.patching import PatchPoint
from pytest_trlcompat.trainers.ppo.ppo_fsdp import root_parameters_unsharded

__all__ = ["PPOAdapterReferenceMixin"]

NULL_REFERENCE = (
    PatchPoint("trl.trainer.ppo_trainer:PPOTrainer.null_ref_context", ">=0.13,<0.26"),
    PatchPoint("trl.experimental.ppo.ppo_trainer:PPOTrainer.null_ref_context", ">=0.26,<1.13"),
)  # without it, TRL asks for a reference model where it trains an adapter


class PPOAdapterReferenceMixin(Cure):
    """Lets a subclass of TRL's PPO trainer take its policy without the adapter, or with another, for its reference.

    Does nothing in one process, under DeepSpeed, and where a reference model is given.
    """

    _kinds: ClassVar = {
        "ppo": ("PPOFSDPMixin", "neither calls the other; cures of one topic stand together"),
    }
    _points: ClassVar[patch_points.Points] = NULL_REFERENCE
    model: Any

    @contextmanager
    def null_ref_context(self) -> Iterator[None]:
        """As upstream: while it lasts the policy, ``self.model.policy``, is the reference."""
        upstream: Any = super()
        # PEFT switches gradients of parameters off, which gathered ones refuse.
        with _policy_lent(self.model), upstream.null_ref_context(), root_parameters_unsharded(self.model):
            yield

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        return under(trainer, "the wrapper has no policy, or has not gathered it", _NO_REFERENCE, _WRAPPED)


_NO_REFERENCE = Condition(
    "without a reference model",
    "there is a reference model",
    lambda trainer: getattr(trainer, "ref_model", None) is None,
)
_WRAPPED = Condition(
    "under DDP or FSDP",
    "neither under DDP nor under FSDP",
    lambda trainer: (
        isinstance(trainer.model, DistributedDataParallel)
        or trainer.accelerator.distributed_type == DistributedType.FSDP
    ),
)


@contextmanager
def _policy_lent(model: nn.Module) -> Iterator[None]:
    """While it lasts, DDP's wrapper has the policy of what it wraps; as an attribute, not as a module of its own."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    vars(model)["policy"] = model.module.policy
    try:
        yield
    finally:
        del vars(model)["policy"]
