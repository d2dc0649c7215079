"""Cure of a reference model under FSDP: it is sharded and placed like the policy.

Issues: ``grpo-fsdp-ref-model``, ``dpo-fsdp-ref-model``, ``kto-fsdp-ref-model``, ``rloo-fsdp-ref-model``.

Under FSDP TRL may leave the reference model whole and on the CPU of every rank, where its first forward fails:
``Expected all tensors to be on the same device``; or shard it as FSDP1 does, which under FSDP2 ends in ``KeyError:
True``. Where it knows FSDP2, it makes the whole reference model one unit, so that each rank gathers all of it at once
(``strategy-memory``); and it shards with ``cpu_ram_efficient_loading`` weights that rank 0 alone has loaded: the others
keep what was in memory, and the loss becomes NaN, or merely wrong. Projects that have prepared the reference model with
Accelerate's ``evaluation_mode=True`` have it whole on every rank. And an older Accelerate with mixed precision makes a
frozen bf16 model fp32 under FSDP2. With ``torch_compile``, what was prepared so is compiled around the whole model;
compilation belongs around what is sharded, as for the policy.

FSDP2 keeps what belongs to no layer gathered after a forward pass, for the backward pass that a reference model never
has (an older torch the root, a newer Accelerate its unit for final norm and output head): embeddings and output head
stay whole on every rank, and ``sync_ref_model`` ends in ``got mixed torch.Tensor and DTensor``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import FSDP, REFERENCE_MODEL, Condition, fsdp_version, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.errors import CureError
from pytest_trlcompat.trainers.curing.patching import replaced_in
from pytest_trlcompat.trainers.curing.upstream import points_of

__all__ = [
    "FSDPReferenceModelMixin",
    "beneath_compile",
    "forget",
    "is_sharded",
    "shard_reference_model",
    "share_parameters",
]

# What preparing a model changes in the plugin. Accelerate 1.6 and 1.7 do not wrap the layers of the policy when the
# reference model was prepared before it and left its own auto-wrap policy behind.
_PLUGIN_STATE = ("activation_checkpointing", "auto_wrap_policy", "param_init_fn", "transformer_cls_names_to_wrap")


def is_sharded(model: nn.Module) -> bool:
    """Whether ``model``, compiled or not, is wrapped by FSDP1 or was sharded by FSDP2."""
    model = beneath_compile(model)
    module_type = getattr(torch.distributed.fsdp, "FSDPModule", None)  # torch 2.6 and later
    return isinstance(model, FullyShardedDataParallel) or (module_type is not None and isinstance(model, module_type))


def share_parameters(model: nn.Module, policy: nn.Module) -> bool:
    """Whether a model is the policy, or has a parameter in common with it: what is done to one is done to the other."""
    trained = {id(parameter) for parameter in policy.parameters()}
    return any(id(parameter) in trained for parameter in model.parameters())


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
        model: whole, on any one device, with or without gradients; also one that Accelerate has prepared with
            ``evaluation_mode=True``, or that was compiled.
        accelerator: the trainer's, configured for FSDP by arguments or by the environment, which also say whether the
            result is compiled.

    Returns:
        The sharded model, in eval mode, none of its parameters requiring a gradient.

    Raises:
        ValueError: ``accelerator`` does not use FSDP.
        CureError: Accelerate has left the model whole.
    """
    version = fsdp_version(accelerator)
    if version is None:
        raise ValueError(
            f"asked to shard a reference model by FSDP, but the accelerator uses {accelerator.distributed_type}; "
            "configure FSDP (TrainingArguments(fsdp=...) or accelerate launch --use_fsdp) on a device it supports"
        )
    # What is compiled is not sharded, nor compiled again.
    compiled, model = model, beneath_compile(model)
    model.requires_grad_(False)
    with _plugin_kept(accelerator.state.fsdp_plugin):
        sharded = (_shard_fsdp2 if version == 2 else _shard_fsdp1)(model, accelerator)
    forget(accelerator, compiled, model, beneath_compile(sharded), sharded)
    if not is_sharded(sharded):
        raise CureError(
            "FSDPReferenceModelMixin",
            expected=f"a reference model sharded by FSDP{version}",
            seen=f"Accelerate has returned a {type(sharded).__name__} that is whole",
            packages=("accelerate", "torch"),
        )
    _reshard_at_once(sharded, accelerator)
    return sharded.eval()


class FSDPReferenceModelMixin(Cure):
    """Shards the reference model of any trainer that keeps one as ``ref_model``, under FSDP1 and FSDP2.

    Where upstream shards it rightly, that runs, and all that is left to do is to mark the reference model's parameters
    as ones that they require no gradient, and to let go of what FSDP2 keeps after a forward pass. It knows by looking
    at the reference model that the trainer made. Does nothing with one that is the policy itself.
    """

    _kinds: ClassVar = {
        "trainer": ("ReferenceOfPolicyMixin", "its __init__ calls this one's"),
        "grpo": ("ReferenceOfPolicyMixin", "its __init__ calls this one's"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.PREPARE_FSDP, patch_points.PREPARE_FSDP2)
    _needed: ClassVar = (
        FSDP,
        REFERENCE_MODEL,
        Condition(
            "of its own",
            "the reference model is the policy itself",
            lambda trainer: _is_own(trainer.ref_model, trainer),
        ),
    )
    accelerator: Any
    callback_handler: Any
    model: Any
    ref_model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        points = points_of(type(self), patch_points.PREPARE_FSDP)
        with replaced_in(points, _prepare_fsdp_of_both_versions, FSDPReferenceModelMixin.__name__):
            super().__init__(*args, **kwargs)
        ref_model = getattr(self, "ref_model", None)
        if _is_own(ref_model, self) and fsdp_version(self.accelerator) is not None:
            self._replace_ref_model(ref_model)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        return under(trainer, "it is sharded like the policy, and asks for no gradients", *cls._needed)

    def _replace_ref_model(self, ref_model: nn.Module) -> None:
        if is_sharded(ref_model):
            ref_model.requires_grad_(False)
            _reshard_at_once(ref_model, self.accelerator)
            return
        self.ref_model = shard_reference_model(ref_model, self.accelerator)
        # SyncRefModelCallback was given the model that the trainer had made.
        for callback in self.callback_handler.callbacks:
            if getattr(callback, "ref_model", None) is ref_model:
                callback.ref_model = self.ref_model


def _is_own(ref_model: Any, trainer: Any) -> bool:
    return isinstance(ref_model, nn.Module) and not share_parameters(ref_model, trainer.model)


def _prepare_fsdp_of_both_versions(upstream: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def prepare_fsdp(model: nn.Module, accelerator: Any) -> nn.Module:
        # Under FSDP2 upstream knows no layers, and does not hand out weights that rank 0 alone has, as Accelerate does.
        ours = fsdp_version(accelerator) == 2 and not is_sharded(model)
        return (shard_reference_model if ours else upstream)(model, accelerator)

    return prepare_fsdp


def _shard_fsdp1(model: nn.Module, accelerator: Any) -> nn.Module:
    # What Accelerate has prepared it hands back as it is, also where that was for evaluation, which shards nothing.
    if getattr(model, "_is_accelerate_prepared", False):
        model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # or its forward would be wrapped twice
        model._is_accelerate_prepared = False
    sharded: nn.Module = accelerator.prepare_model(model)
    return sharded


def _shard_fsdp2(model: nn.Module, accelerator: Any) -> nn.Module:
    # Accelerator.prepare insists on an optimizer, and prepare_model refuses FSDP2; both call this for the policy.
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    sharded: nn.Module = fsdp2_prepare_model(_WithoutUpcast(accelerator), model)
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend.value == "NO":
        return sharded
    # As Accelerate's prepare_model does under FSDP1.
    return cast(nn.Module, torch.compile(sharded, **plugin.to_kwargs()))


class _WithoutUpcast:
    """An accelerator for which parameters stay in their dtype: a reference model has no use for fp32 masters.

    Accelerate up to 1.12 makes them all fp32, later ones those that are trained.

    Which dtype it computes in, FSDP's plugin says.
    """

    mixed_precision = "no"

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def _reshard_at_once(model: nn.Module, accelerator: Any) -> None:
    """Have every unit let go of what FSDP2 gathered for a forward pass, as layers do, where that was asked for.

    FSDP2 keeps some of them for a backward pass. Resharding what is sharded does nothing.
    """
    if fsdp_version(accelerator) == 2 and accelerator.state.fsdp_plugin.reshard_after_forward:
        root = beneath_compile(model)
        units: list[Any] = [module for module in root.modules() if is_sharded(module)]

        def reshard(*_: Any) -> None:
            for unit in units:
                unit.reshard()

        root.register_forward_hook(reshard)


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


def forget(accelerator: Any, *models: nn.Module) -> None:
    """Take models out of those that the accelerator trains, clips the gradients of, and counts before an evaluation."""
    accelerator._models = [held for held in accelerator._models if not any(held is model for model in models)]
