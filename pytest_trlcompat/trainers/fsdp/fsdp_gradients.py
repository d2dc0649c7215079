"""Cure of ``grpo-fsdp-no-shard-gradients``: all gradients that GRPO accumulates under FSDP1 ``NO_SHARD`` count.

GRPO generates with the module beneath the wrapper, so that FSDP1's units run without their root. What the root does
first, forgetting the gradients that ``zero_grad`` took away from the parameters, is left out; a unit with
``use_orig_params`` then marks its parameters as having none, and the mark outlives every backward pass that does not
synchronise. Of a step's accumulated gradients a unit keeps the last alone, without an error. The cure does before each
generation what the root would have done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import FSDP1
from pytest_trlcompat.trainers.curing.cure import Activity
from pytest_trlcompat.trainers.curing.upstream import AroundGeneration
from pytest_trlcompat.trainers.fsdp.fsdp_ref_model import beneath_compile

__all__ = ["FSDPGradientsMixin", "forget_zeroed_gradients"]


def forget_zeroed_gradients(model: nn.Module) -> None:
    """Let each FSDP1 unit of ``model`` drop its flat gradient if none of its parameters has a gradient.

    FSDP does the same when a root is called. Safe at any time between a step and the next backward pass; does nothing
    for units with accumulated gradients, nor for models that FSDP1 did not wrap.
    """
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        handle = unit._handle  # nothing public does it; FSDP1 is frozen
        if handle is not None:
            handle._reset_flat_param_grad_info_if_needed()


class FSDPGradientsMixin(AroundGeneration):
    """Lets a subclass of ``trl.GRPOTrainer`` accumulate gradients under FSDP1 ``NO_SHARD``.

    Does nothing for models that are not wrapped so, nor with vLLM, which generates elsewhere.
    """

    _kinds: ClassVar = {
        "grpo": ("FSDPCheckpointedCacheMixin", "neither calls the other; cures of one topic stand together"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.GENERATION, patch_points.FSDP1_RESET_GRADIENTS)
    _needed: ClassVar = (FSDP1,)
    args: Any
    model_wrapped: Any

    @contextmanager
    def _around_generation(self) -> Iterator[None]:
        with self._zeroed_gradients_forgotten(), super()._around_generation():
            yield

    def _zeroed_gradients_forgotten(self) -> AbstractContextManager[None]:
        model = self.model_wrapped
        if not FSDPGradientsMixin._activity(type(self), self).active:
            return nullcontext()

        def forgetting(unwrap: Callable[..., Any]) -> Callable[..., Any]:
            @contextmanager
            def unwrap_model_for_generation(*args: Any, **kwargs: Any) -> Iterator[Any]:
                # The root's forward pass begins with this, and generation goes past the root.
                forget_zeroed_gradients(model)
                with unwrap(*args, **kwargs) as unwrapped:
                    yield unwrapped

            return unwrap_model_for_generation

        return self._unwrapping(forgetting, FSDPGradientsMixin.__name__)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if trainer is None:
            return Activity(None, "changes something under FSDP1 NO_SHARD without vLLM")
        model = beneath_compile(trainer.model_wrapped)
        if not isinstance(model, FullyShardedDataParallel):
            if FSDP1.holds(trainer):
                return Activity(None, "the policy is not wrapped yet")
            return Activity(False, FSDP1.otherwise)
        if model.sharding_strategy != ShardingStrategy.NO_SHARD:
            return Activity(False, "the policy is sharded")
        if trainer.args.use_vllm:
            return Activity(False, "vLLM generates")
        return Activity(True, "FSDP1 NO_SHARD wraps the policy, and generation runs beneath its root")
