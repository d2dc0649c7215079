"""Cure of ``grpo-fsdp-sync-ref-model``: under FSDP1 a synchronised reference model computes with its new weights.

``sync_ref_model=True`` mixes the policy into the reference model by writing to the parameters, which under FSDP1 are
this rank's shards. But FSDP1 keeps the gathered parameters of a root after a forward pass, for the backward pass that a
reference model never has, and takes them for fresh: embeddings, final norm and output head stay what they were, under
``SHARD_GRAD_OP`` every weight does, and training goes on. ``NO_SHARD``, FSDP2 and DeepSpeed are right. The cure has
every unit let go of what it has gathered, then mixes the shards, which are the same slices of the same parameters on
each rank: nothing is gathered, and ranks need not meet.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp import _runtime_utils as fsdp1  # it has no public way to free what was gathered; frozen

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import FSDP1, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.errors import CureError
from pytest_trlcompat.trainers.curing.patching import PatchPoint
from pytest_trlcompat.trainers.fsdp.fsdp_ref_model import beneath_compile

try:
    from trl.trainer.callbacks import SyncRefModelCallback
except ImportError:  # without TRL, or before it had one, there is no callback to exchange
    from transformers import TrainerCallback

    class SyncRefModelCallback(TrainerCallback):  # type: ignore[no-redef]
        """In the place of TRL's."""


__all__ = [
    "FSDPSyncRefModelCallback",
    "FSDPSyncRefModelMixin",
    "check_alike",
    "keeps_gathered_parameters",
    "mix_parameters",
]

FSDP1_WRITE_BACK = PatchPoint("torch.distributed.fsdp._flat_param:FlatParamHandle._writeback_orig_params")

_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
"""Names that FSDP1, activation checkpointing and ``torch.compile`` put into those of modules and parameters."""


def keeps_gathered_parameters(model: nn.Module) -> bool:
    """Whether ``model`` is sharded by FSDP1, so that what is written to its shards may never be gathered."""
    model = beneath_compile(model)
    return isinstance(model, FullyShardedDataParallel) and model.sharding_strategy != ShardingStrategy.NO_SHARD


def mix_parameters(target: nn.Module, source: nn.Module, alpha: float) -> None:
    """Make every parameter of ``target`` ``(1 - alpha)`` times itself plus ``alpha`` times that of ``source``.

    Changes this rank's shards alone; to be called on every rank, in whatever order.

    Args:
        target: a root of FSDP1, compiled or not, outside forward and backward.
        source: another, of the same architecture.

    Raises:
        CureError: see :func:`check_alike`.
    """
    check_alike(target, source)
    of_source = _units(source)
    for name, unit in _units(target).items():
        to, of = unit._handle, of_source[name]._handle
        if to is None:
            continue
        if _has_run(unit) and to.uses_sharded_strategy:  # NO_SHARD has nothing to free
            fsdp1._reshard(unit, to, True)
        # An optimizer may have put another tensor in a parameter's place.
        if of._use_orig_params:
            of._writeback_orig_params()
        with torch.no_grad():
            shard = _shard(unit)
            shard.mul_(1.0 - alpha).add_(_shard(of_source[name]).to(shard.device), alpha=alpha)


def check_alike(target: nn.Module, source: nn.Module) -> None:
    """Refuse two models whose shards are not slices of the same parameters.

    Args:
        target: a root of FSDP1, compiled or not.
        source: another.

    Raises:
        CureError: with the first FSDP unit that one of them lacks, or that is made up otherwise.
    """
    models = {"reference model": _units(target), "policy": _units(source)}
    layouts = {role: {name: _layout(unit) for name, unit in units.items()} for role, units in models.items()}
    ours, theirs = layouts.values()
    for name in dict.fromkeys((*ours, *theirs)):
        if ours.get(name) != theirs.get(name):
            difference = "; ".join(f"{role}: {_described(layout.get(name))}" for role, layout in layouts.items())
            raise CureError(
                "FSDPSyncRefModelMixin",
                expected=f"the same FSDP1 unit {name or 'at the root'!r} in policy and reference model, to mix shards",
                seen=f"it differs: {difference}",
                packages=("trl", "accelerate", "torch"),
                remedy="Give both models the same dtype and the same fsdp_transformer_layer_cls_to_wrap, and leave it "
                "to the trainer to shard the reference model; or train without sync_ref_model",
            )


class FSDPSyncRefModelCallback(SyncRefModelCallback):
    """TRL's callback of that name, right under FSDP1 too. Leaves models that are not sharded by FSDP1 to TRL's.

    Raises:
        CureError: when a training begins, if FSDP1 has sharded the two models in different ways, or one of them alone.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        model = kwargs["model"]
        if self.ref_model is not None and (
            keeps_gathered_parameters(self.ref_model) or _root(model, self.accelerator) is not None
        ):
            self._policy(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.ref_model is None or not keeps_gathered_parameters(self.ref_model):
            super().on_step_end(args, state, control, **kwargs)
        elif state.global_step % args.ref_model_sync_steps == 0:
            mix_parameters(self.ref_model, self._policy(kwargs["model"]), args.ref_model_mixup_alpha)

    def _policy(self, model: nn.Module) -> nn.Module:
        """The policy as ``mix_parameters`` wants it; refused where it and the reference model are not sharded alike."""
        policy = _root(model, self.accelerator)
        sharded = {"reference model": keeps_gathered_parameters(self.ref_model), "policy": policy is not None}
        if policy is None or not all(sharded.values()):
            raise CureError(
                "FSDPSyncRefModelMixin",
                expected="policy and reference model both sharded by FSDP1, to mix their shards",
                seen=", ".join(f"the {role} is{'' if is_so else ' not'}" for role, is_so in sharded.items()),
                packages=("trl", "accelerate", "torch"),
                remedy="Leave it to the trainer to shard the reference model, or train without sync_ref_model",
            )
        check_alike(self.ref_model, policy)
        return policy


class FSDPSyncRefModelMixin(Cure):
    """Gives a subclass of a TRL trainer :class:`FSDPSyncRefModelCallback` for the callback that TRL made for it."""

    _kinds: ClassVar = {
        "trainer": ("VLLMRestartMixin", "its __init__ calls this one's"),
        "grpo": ("Float32LogProbsMixin", "neither calls the other; it was measured here"),
    }
    _points: ClassVar[patch_points.Points] = (
        PatchPoint("trl.trainer.callbacks:SyncRefModelCallback.on_step_end", ">=0.12"),
        patch_points.FSDP1_RESHARD,
        FSDP1_WRITE_BACK,
    )
    _needed: ClassVar = (FSDP1,)
    accelerator: Any
    callback_handler: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        callbacks = self.callback_handler.callbacks
        for position, callback in enumerate(callbacks):
            # Not a user's subclass, which may synchronise in another way.
            if type(callback) is SyncRefModelCallback:
                callbacks[position] = FSDPSyncRefModelCallback(callback.ref_model, callback.accelerator)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if trainer is None or not FSDP1.holds(trainer):
            return under(trainer, "with sync_ref_model=True and a reference model that is sharded", *cls._needed)
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, FSDPSyncRefModelCallback):
                if callback.ref_model is not None and keeps_gathered_parameters(callback.ref_model):
                    return Activity(True, "a reference model that FSDP1 shards is synchronised")
                return Activity(False, "the reference model is not sharded")
        return Activity(False, "no reference model is synchronised")


def _root(policy: nn.Module, accelerator: Any) -> nn.Module | None:
    """The wrapper of a policy whose shards are to be mixed, ``None`` where it has none.

    Transformers before 4.50 passes the module beneath it to callbacks.
    """
    policy = beneath_compile(policy)
    prepared = [beneath_compile(model) for model in (accelerator._models if accelerator is not None else [])]
    wrappers = [model for model in (policy, *prepared) if keeps_gathered_parameters(model)]
    return next((model for model in wrappers if policy in (model, beneath_compile(model.module))), None)


def _units(model: nn.Module) -> dict[str, Any]:
    """FSDP1's units by the names that their modules have without any wrapper."""
    units = FullyShardedDataParallel.fsdp_modules(model)
    names = {id(module): name for name, module in model.named_modules()}
    return {_bare(names[id(unit)]): unit for unit in units}


def _has_run(unit: Any) -> bool:
    """Whether FSDP1 has prepared a unit for forward passes, so that it can have gathered parameters."""
    return unit._is_root is not None


def _shard(unit: Any) -> torch.Tensor:
    """This rank's slice of a unit's parameters: of one dimension, padded, in the dtype that the optimizer sees."""
    flat = unit._handle.flat_param
    # FSDP1 sets `_local_shard` when it prepares the first forward pass; from then on `data` may be gathered parameters.
    shard: torch.Tensor = flat._local_shard if _has_run(unit) else flat.data
    return shard


def _layout(unit: Any) -> tuple[Any, ...] | None:
    """What decides which elements of which parameters a rank's shard of a unit holds; ``None`` for no parameters."""
    handle = unit._handle
    if handle is None:
        return None
    flat = handle.flat_param
    names = tuple(_bare(name) for name in flat._fqns)
    padded = tuple(flat._numels_with_padding)
    return names, tuple(flat._shapes), padded, tuple(flat._sharded_size), handle.rank, handle.world_size


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _described(layout: tuple[Any, ...] | None) -> str:
    if layout is None:
        return "no such unit, or one without parameters"
    names, shapes, padded, shard, rank, world = layout
    elements = sum(shape.numel() for shape in shapes)
    return (
        f"{len(names)} parameters of {elements} elements, {sum(padded)} with padding, in shards of {shard[0]}, rank "
        f"{rank} of {world}"
    )
