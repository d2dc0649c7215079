"""Cure of ``fsdp-sharded-save``: ``save_model`` writes the policy under any type of state dict.

Under FSDP ``Trainer.save_model`` writes where the plugin's state dict type is ``FULL_STATE_DICT``, and otherwise
returns without a word and without a file. Checkpoints are complete all the same: their shards are written elsewhere.
The cure sets that type while ``save_model`` runs.

What Accelerate gathers then is wrong or too much in some releases: one asks the module beneath FSDP1's root, so that
what belongs to no layer (embeddings, final norm, output head) is what it was when FSDP1 last gathered it, and is
written so; others gather the whole model of FSDP2 on every rank's accelerator. The cure asks the root, and gathers one
tensor at a time for rank 0's memory.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import StateDictType

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import FSDP, fsdp_version, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.patching import original, replaced
from pytest_trlcompat.trainers.fsdp.fsdp_ref_model import beneath_compile, is_sharded

__all__ = ["FSDPSaveMixin", "full_state_dict", "gathered_for_rank_0", "state_dict_on_rank_0"]


@contextmanager
def full_state_dict(accelerator: Any) -> Iterator[None]:
    """Let ``accelerator`` ask for whole state dicts while the context lasts. Does nothing without FSDP."""
    if fsdp_version(accelerator) is None:
        yield
        return
    plugin = accelerator.state.fsdp_plugin
    before, plugin.state_dict_type = plugin.state_dict_type, StateDictType.FULL_STATE_DICT
    try:
        yield
    finally:
        plugin.state_dict_type = before


def gathered_for_rank_0() -> AbstractContextManager[None]:
    """Let Accelerate's ``get_state_dict`` gather right tensors, in rank 0's memory alone, while the context lasts."""
    return replaced(patch_points.GET_STATE_DICT, _right)


def _right(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def get_state_dict(self: Any, model: Any, unwrap: bool = True) -> Any:
        version = fsdp_version(self)
        # Accelerate 1.6 and 1.7 leave the whole model on every rank's accelerator.
        if version == 2 and is_sharded(model) and not _gathers_for_rank_0():
            return state_dict_on_rank_0(beneath_compile(model), self.device)
        # Every release but 0.34 asks the root, whatever it is told.
        return upstream(self, model, unwrap=unwrap and version != 1)

    return get_state_dict


def _gathers_for_rank_0() -> bool:
    """Whether Accelerate does so under FSDP2: it names the option from 1.8 on."""
    return "cpu_offload" in str(inspect.unwrap(original(patch_points.GET_STATE_DICT)).__code__.co_consts)


def state_dict_on_rank_0(model: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """The whole state dict of a model that FSDP2 has sharded, in rank 0's memory; collective.

    One tensor at a time is whole on each rank's accelerator. What is tied stays one tensor.

    Args:
        device: to gather on, also where shards are offloaded.

    Returns:
        Names to tensors on the CPU on rank 0, nothing on the others.
    """
    copies: dict[int, torch.Tensor | None] = {}  # every rank must gather what is tied once
    # The parameters themselves: of detached tensors nobody can see which are tied.
    named = model.state_dict(keep_vars=True)
    for tensor in named.values():
        if id(tensor) not in copies:
            whole = tensor.detach()
            if hasattr(whole, "full_tensor"):
                # Offloaded shards lie on the host, where the accelerator's backend cannot gather.
                whole = whole.to(device).full_tensor()
            copies[id(tensor)] = whole.cpu() if torch.distributed.get_rank() == 0 else None
    whole_by_name = {name: copies[id(tensor)] for name, tensor in named.items()}
    return {name: tensor for name, tensor in whole_by_name.items() if tensor is not None}


class FSDPSaveMixin(Cure):
    """Lets ``save_model`` and ``push_to_hub`` of any ``transformers.Trainer`` write the whole model under FSDP.

    Gathers it as ``FULL_STATE_DICT`` does; checkpoints stay as the state dict type has them.
    """

    _kinds: ClassVar = {
        "trainer": ("FSDP2GradNormMixin", "neither calls the other; cures of one topic stand together"),
        "grpo": ("FSDP2GradNormMixin", "neither calls the other; cures of one topic stand together"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.SAVE_MODEL, patch_points.GET_STATE_DICT)
    accelerator: Any

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        # A checkpoint is the one internal call that names its folder; its shards are written with the optimizer's.
        internal = kwargs.get("_internal_call", len(args) > 1 and args[1] is True)
        checkpoint = internal and ((bool(args) and args[0] is not None) or kwargs.get("output_dir") is not None)
        upstream: Any = super()
        with ExitStack() as stack:
            if not checkpoint:
                stack.enter_context(full_state_dict(self.accelerator))
            if fsdp_version(self.accelerator) is not None:
                stack.enter_context(gathered_for_rank_0())
            upstream.save_model(*args, **kwargs)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        if trainer is None or not FSDP.holds(trainer):
            return under(trainer, "what is saved depends on the type of state dict, and on Accelerate", FSDP)
        version = fsdp_version(trainer.accelerator)
        if "FULL_STATE_DICT" not in str(trainer.accelerator.state.fsdp_plugin.state_dict_type):
            return Activity(True, "upstream writes nothing unless the state dict type is FULL_STATE_DICT")
        if version == 2 and not _gathers_for_rank_0():
            return Activity(True, "Accelerate gathers the whole model on every rank")
        if version == 1 and _unwraps_fsdp1():
            return Activity(True, "Accelerate asks the module beneath FSDP1's root for its state dict")
        return Activity(False, "the state dict type is FULL_STATE_DICT")


def _unwraps_fsdp1() -> bool:
    """Whether Accelerate asks a module beneath FSDP1's root, which it does in 0.34 alone.

    Its ``get_state_dict`` then unwraps in three places, and in two otherwise.
    """
    code = inspect.unwrap(original(patch_points.GET_STATE_DICT)).__code__
    calls = [instruction for instruction in dis.get_instructions(code) if instruction.argval == "unwrap_model"]
    return len(calls) > 2
