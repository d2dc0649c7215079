"""Cure of ``grpo-fsdp-generation``: generation under FSDP1, with the root's parameters summoned.

GRPO generates with the module beneath the wrapper. FSDP1 gathers the parameters of each layer when the layer is called,
but those of the root (embeddings, final norm, output head) only when the wrapper is: ``'weight' must be 2-D``. FSDP2
has no wrapper and needs no cure.

Imports torch, and of this package ``_upstream`` and ``fsdp_ref_model``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from pytest_trlcompat.trainers import patch_points
from pytest_trlcompat.trainers._patching import replaced
from pytest_trlcompat.trainers._upstream import AroundGeneration, class_uses
from pytest_trlcompat.trainers.fsdp_ref_model import fsdp_version

__all__ = ["FSDPGenerationMixin", "root_parameters_summoned"]


@contextmanager
def root_parameters_summoned(model: nn.Module) -> Iterator[None]:
    """Gather the root parameters of an FSDP1 ``model`` on every rank while the context lasts; collective.

    Layers stay sharded and are gathered one at a time as ever. What is written to the parameters is lost. Does nothing
    for any other model.
    """
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False):
            yield
    else:
        yield


class FSDPGenerationMixin(AroundGeneration):
    """Lets a subclass of ``trl.GRPOTrainer`` generate under FSDP1 ``full_shard``.

    It knows by looking for ``summon_full_params`` in the trainer's methods, and does nothing where TRL calls it. With
    vLLM, which generates elsewhere, it does nothing either.
    """

    accelerator: Any
    args: Any

    @contextmanager
    def _around_generation(self) -> Iterator[None]:
        with self._generation_summoned(), super()._around_generation():
            yield

    def _generation_summoned(self) -> AbstractContextManager[None]:
        needed = (
            fsdp_version(self.accelerator) == 1
            and not self.args.use_vllm
            and not class_uses(type(self), "summon_full_params")
        )
        return replaced(patch_points.GENERATION, _summoning) if needed else nullcontext()


def _summoning(unwrap: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def unwrap_model_for_generation(model: nn.Module, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with unwrap(model, *args, **kwargs) as unwrapped, root_parameters_summoned(model):
            yield unwrapped

    return unwrap_model_for_generation
