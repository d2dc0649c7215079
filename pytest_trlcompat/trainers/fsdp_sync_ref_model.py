"""Cure of ``grpo-fsdp-sync-ref-model``: under FSDP1 a synchronised reference model computes with its new weights.

``sync_ref_model=True`` mixes the policy into the reference model by writing to the parameters, which under FSDP1 are
this rank's shards. But FSDP1 keeps the gathered parameters of a root after a forward pass, for the backward pass that a
reference model never has, and takes them for fresh: embeddings, final norm and output head stay what they were, under
``SHARD_GRAD_OP`` every weight does, and training goes on. ``NO_SHARD``, FSDP2 and DeepSpeed are right. The cure writes
to the gathered parameters.

Imports torch, Transformers' callbacks through TRL, and nothing of this package.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from trl.trainer.callbacks import SyncRefModelCallback

from pytest_trlcompat.trainers._cure import Cure

__all__ = ["FSDPSyncRefModelCallback", "FSDPSyncRefModelMixin", "keeps_gathered_parameters", "mix_parameters"]


def keeps_gathered_parameters(model: nn.Module) -> bool:
    """Whether ``model`` is sharded by FSDP1, so that what is written to its shards may never be gathered."""
    return isinstance(model, FullyShardedDataParallel) and model.sharding_strategy != ShardingStrategy.NO_SHARD


def mix_parameters(target: nn.Module, source: nn.Module, alpha: float) -> None:
    """Make every parameter of ``target`` ``(1 - alpha)`` times itself plus ``alpha`` times that of ``source``.

    Collective. Gathers one FSDP unit of each at a time, where both are wrapped alike, else both models.

    Args:
        target: a root of FSDP1, outside forward and backward.
        source: another, of the same architecture.
    """
    names = [[name for name, _ in _units(model)] for model in (target, source)]
    alike = names[0] == names[1]
    pairs = zip(_units(target), _units(source), strict=True) if alike else [(("", target), ("", source))]
    for (_, to), (_, of) in pairs:
        with (
            torch.no_grad(),
            FullyShardedDataParallel.summon_full_params(to, recurse=not alike),
            FullyShardedDataParallel.summon_full_params(of, recurse=not alike, writeback=False),
        ):
            of_source = dict(_parameters(of, recurse=not alike))
            for name, parameter in _parameters(to, recurse=not alike):
                parameter.mul_(1.0 - alpha).add_(of_source[name], alpha=alpha)


class FSDPSyncRefModelCallback(SyncRefModelCallback):
    """TRL's callback of that name, right under FSDP1 too. Leaves models that are not sharded by FSDP1 to TRL's."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        policy = _root(kwargs["model"], self.accelerator)
        if policy is None or self.ref_model is None or not keeps_gathered_parameters(self.ref_model):
            super().on_step_end(args, state, control, **kwargs)
        elif state.global_step % args.ref_model_sync_steps == 0:
            mix_parameters(self.ref_model, policy, args.ref_model_mixup_alpha)


class FSDPSyncRefModelMixin(Cure):
    """Gives a subclass of a TRL trainer :class:`FSDPSyncRefModelCallback` for the callback that TRL made for it."""

    callback_handler: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        callbacks = self.callback_handler.callbacks
        for position, callback in enumerate(callbacks):
            if type(callback) is SyncRefModelCallback:
                callbacks[position] = FSDPSyncRefModelCallback(callback.ref_model, callback.accelerator)


def _root(policy: nn.Module, accelerator: Any) -> FullyShardedDataParallel | None:
    """The wrapper of a policy; Transformers before 4.50 passes the module beneath it to callbacks."""
    prepared = accelerator._models if accelerator is not None else []
    wrappers = [model for model in (policy, *prepared) if isinstance(model, FullyShardedDataParallel)]
    return next((model for model in wrappers if policy in (model, model.module)), None)


def _units(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            yield name, module


def _parameters(unit: nn.Module, recurse: bool, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by the names they have without wrappers; those of nested units only where ``recurse``."""
    for name, parameter in unit.named_parameters(recurse=False):
        yield prefix + name, parameter
    for name, child in unit.named_children():
        if recurse or not isinstance(child, FullyShardedDataParallel):
            wrapper = isinstance(unit, FullyShardedDataParallel)
            yield from _parameters(child, recurse, prefix if wrapper else f"{prefix}{name}.")
