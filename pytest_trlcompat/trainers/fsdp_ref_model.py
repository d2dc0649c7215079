"""Cure of ``grpo-fsdp-ref-model``: a reference model sharded and placed like the policy.

Under FSDP TRL may leave the reference model whole and on the CPU of every rank, where its first forward fails:
``Expected all tensors to be on the same device``; or shard it as FSDP1 does, which under FSDP2 ends in ``KeyError:
True``. Where it knows FSDP2, it shards with ``cpu_ram_efficient_loading`` weights that rank 0 alone has loaded: the
others keep what was in memory, and the loss becomes NaN, or merely wrong.

FSDP2 of an older torch keeps the root of a model gathered after a forward pass, for the backward pass that a reference
model never has: embeddings and output head stay whole on every rank, and ``sync_ref_model`` ends in ``got mixed
torch.Tensor and DTensor``.

Imports torch, Accelerate and, of this package, ``_upstream``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from pytest_trlcompat.trainers import patch_points
from pytest_trlcompat.trainers._cure import Cure
from pytest_trlcompat.trainers._patching import replaced
from pytest_trlcompat.trainers._upstream import function_uses

__all__ = ["FSDPReferenceModelMixin", "beneath_compile", "fsdp_version", "is_sharded", "shard_reference_model"]

# What preparing a model changes in the plugin. Accelerate 1.6 and 1.7 do not wrap the layers of the policy when the
# reference model was prepared before it and left its own auto-wrap policy behind.
_PLUGIN_STATE = ("activation_checkpointing", "auto_wrap_policy", "param_init_fn")


def fsdp_version(accelerator: Any) -> int | None:
    """Version of FSDP, 1 or 2, that ``accelerator`` prepares models with; ``None`` for another strategy.

    Accelerate without a device that it can shard on (plain CPU) has FSDP settings and does not use them.
    """
    if accelerator.distributed_type != DistributedType.FSDP:
        return None
    return getattr(accelerator.state.fsdp_plugin, "fsdp_version", None) or 1


def is_sharded(model: nn.Module) -> bool:
    """Whether ``model``, compiled or not, is wrapped by FSDP1 or was sharded by FSDP2."""
    model = beneath_compile(model)
    module_type = getattr(torch.distributed.fsdp, "FSDPModule", None)  # torch 2.6 and later
    return isinstance(model, FullyShardedDataParallel) or (module_type is not None and isinstance(model, module_type))


def beneath_compile(model: Any) -> Any:
    """The module that ``torch.compile`` was given; ``model`` itself where it was given none."""
    while "_orig_mod" in getattr(model, "_modules", {}):
        model = model._orig_mod
    return model


def shard_reference_model(model: nn.Module, accelerator: Any) -> nn.Module:
    """Shard a reference model as ``accelerator`` shards the policy: same wrapping, same precision, same device.

    The parameters of ``model`` move into the result (FSDP1 returns a wrapper, FSDP2 the model itself): use nothing but
    the result afterwards. ``accelerator`` does not count it among the models that it trains.

    Args:
        model: whole, on any one device, with or without gradients.
        accelerator: the trainer's, configured for FSDP by arguments or by the environment.

    Returns:
        The sharded model, in eval mode, none of its parameters requiring a gradient.

    Raises:
        ValueError: ``accelerator`` does not use FSDP.
    """
    version = fsdp_version(accelerator)
    if version is None:
        raise ValueError(
            f"asked to shard a reference model by FSDP, but the accelerator uses {accelerator.distributed_type}; "
            "configure FSDP (TrainingArguments(fsdp=...) or accelerate launch --use_fsdp) on a device it supports"
        )
    model.requires_grad_(False)
    with _plugin_kept(accelerator.state.fsdp_plugin):
        sharded = _shard_fsdp2(model, accelerator) if version == 2 else accelerator.prepare_model(model)
    _forget(accelerator, model, sharded)
    _reshard_root(sharded, accelerator)
    return sharded.eval()


class FSDPReferenceModelMixin(Cure):
    """Shards the reference model of a subclass of ``trl.GRPOTrainer`` under FSDP1 and FSDP2.

    Where TRL shards it rightly, that runs, and all that is left to do is to mark the reference model's parameters as
    ones that they require no gradient, and to let go of the root's after a forward pass. It knows by looking at the
    reference model that TRL made, and at TRL's ``prepare_fsdp``.
    """

    accelerator: Any
    callback_handler: Any
    ref_model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with replaced(patch_points.PREPARE_FSDP, _prepare_fsdp_of_both_versions):
            super().__init__(*args, **kwargs)
        if self.ref_model is not None and fsdp_version(self.accelerator) is not None:
            self._replace_ref_model(self.ref_model)

    def _replace_ref_model(self, whole: nn.Module) -> None:
        if is_sharded(whole):
            whole.requires_grad_(False)
            _reshard_root(whole, self.accelerator)
            return
        self.ref_model = shard_reference_model(whole, self.accelerator)
        # SyncRefModelCallback was given the model that TRL had made.
        for callback in self.callback_handler.callbacks:
            if getattr(callback, "ref_model", None) is whole:
                callback.ref_model = self.ref_model


def _prepare_fsdp_of_both_versions(upstream: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def prepare_fsdp(model: nn.Module, accelerator: Any) -> nn.Module:
        right = fsdp_version(accelerator) != 2 or _shards_fsdp2(upstream, accelerator)
        return (upstream if right else shard_reference_model)(model, accelerator)

    return prepare_fsdp


def _shards_fsdp2(prepare_fsdp: Callable[..., nn.Module], accelerator: Any) -> bool:
    # With cpu_ram_efficient_loading rank 0 alone has weights, and TRL does not hand them out as Accelerate does.
    efficient = accelerator.state.fsdp_plugin.cpu_ram_efficient_loading
    return function_uses(prepare_fsdp, "fully_shard") and not efficient


def _shard_fsdp2(model: nn.Module, accelerator: Any) -> nn.Module:
    # Accelerator.prepare insists on an optimizer, and prepare_model refuses FSDP2; both call this for the policy.
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    return fsdp2_prepare_model(accelerator, model)


def _reshard_root(model: nn.Module, accelerator: Any) -> None:
    """Have the root let go of what FSDP2 gathered for a forward pass, as its layers do, where that was asked for.

    From torch 2.8 on FSDP2 does so itself, and resharding what is sharded does nothing.
    """
    if fsdp_version(accelerator) == 2 and accelerator.state.fsdp_plugin.reshard_after_forward:
        model.register_forward_hook(lambda root, *_: root.reshard())


@contextmanager
def _plugin_kept(plugin: Any) -> Iterator[None]:
    """Keep the plugin as it is for the policy, and do not checkpoint activations of a model without gradients."""
    before = {name: getattr(plugin, name) for name in _PLUGIN_STATE}
    plugin.activation_checkpointing = False
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(plugin, name, value)


def _forget(accelerator: Any, *models: nn.Module) -> None:
    """Take models out of those that the accelerator trains, clips the gradients of, and counts before an evaluation."""
    accelerator._models = [one for one in accelerator._models if not any(one is model for model in models)]
