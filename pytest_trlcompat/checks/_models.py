"""Models as ranks hold them: wrapped by DDP, FSDP1 or DeepSpeed, sharded by FSDP1, FSDP2 or ZeRO-3, or whole."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

__all__ = [
    "clean_name",
    "devices",
    "gathered_share",
    "is_engine",
    "local_shard",
    "named_parameters",
    "own_tensors",
    "scales_loss",
    "sharding",
    "unwrapped",
    "whole_tensors",
    "without",
]

# What wrappers put into the names of parameters.
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


def unwrapped(model: nn.Module) -> nn.Module:
    """The module beneath DDP, DeepSpeed's engine, ``torch.compile`` and FSDP1's outermost unit."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel | FullyShardedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif is_engine(model):
            model = model.module
        else:
            return model


def is_engine(model: nn.Module) -> bool:
    return hasattr(model, "zero_optimization_stage") and isinstance(getattr(model, "module", None), nn.Module)


def scales_loss(trainer: Any, model: nn.Module) -> bool:
    """Whether the loss is scaled (fp16), so that gradients may overflow and a step is then skipped.

    A fused optimizer skips it by itself, which neither Accelerate nor a scheduler sees.
    """
    scaled = is_engine(model) and hasattr(model, "fp16_enabled") and bool(model.fp16_enabled())
    return scaled or str(trainer.accelerator.mixed_precision) == "fp16"


def clean_name(name: str) -> str:
    """The name of a parameter as the plain model has it, without what wrappers of inner modules add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Every parameter once, in the same order on every rank, with the plain model's names."""
    return [(clean_name(name), parameter) for name, parameter in unwrapped(model).named_parameters()]


def without(named: Sequence[tuple[str, nn.Parameter]], ignore: Sequence[str]) -> list[tuple[str, nn.Parameter]]:
    """Leave out what a shell pattern in ``ignore`` matches by name."""
    return [
        (name, parameter)
        for name, parameter in named
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore)
    ]


def local_shard(tensor: Tensor) -> Tensor:
    """The part of a parameter or gradient that this rank holds at rest; all of it if nothing is sharded.

    Under ZeRO-3 this is flat, and padded on the last ranks.
    """
    shard = getattr(tensor, "ds_tensor", tensor)  # ZeRO-3
    if hasattr(shard, "to_local"):  # FSDP2: a DTensor
        shard = shard.to_local()
    return shard.detach()


def sharding(model: nn.Module) -> str:
    """How ranks share the parameters: ``zero3``, ``fsdp2``, ``fsdp1 FULL_SHARD`` or ``none``, among others."""
    if any(hasattr(parameter, "ds_tensor") for parameter in model.parameters()):
        return "zero3"
    if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        return "fsdp2"
    units = FullyShardedDataParallel.fsdp_modules(model)
    if units:
        return f"fsdp1 {'/'.join(sorted({unit.sharding_strategy.name for unit in units}))}"
    return "none"


def devices(model: nn.Module) -> list[str]:
    """The devices on which this rank keeps its shards of the parameters, sorted."""
    return sorted({str(local_shard(parameter).device) for parameter in model.parameters()})


def gathered_share(model: nn.Module) -> float | None:
    """The share of a model's elements in its largest unit of FSDP, which a forward gathers at once.

    Counted by what this rank holds, since FSDP gives every rank the same share of each unit but for padding. ``None``
    where FSDP gathers nothing: whole models, ZeRO-3 (which gathers parameter by parameter), FSDP1 without sharding.
    """
    if not sharding(model).startswith("fsdp") or sharding(model) == "fsdp1 NO_SHARD":
        return None
    units = [module for module in model.modules() if _is_unit(module)]
    sizes: dict[nn.Module, int] = {}
    counted: set[int] = set()
    # Inner units first: what they hold does not count for the outer ones.
    for unit in reversed(units):
        unit_parameters = {id(parameter): parameter for parameter in unit.parameters() if id(parameter) not in counted}
        counted |= set(unit_parameters)
        sizes[unit] = sum(local_shard(parameter).numel() for parameter in unit_parameters.values())
    total = sum(sizes.values())
    return max(sizes.values()) / total if total else None


def _is_unit(module: nn.Module) -> bool:
    """Of FSDP1, or of FSDP2, which changes a module's class to one that derives from ``FSDPModule``."""
    fsdp2 = any(base.__name__ == "FSDPModule" for base in type(module).__mro__)
    return fsdp2 or isinstance(module, FullyShardedDataParallel)


def whole_tensors(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, str, Tensor]]:
    """Parameters and persistent buffers, gathered one at a time (FSDP1: one unit at a time); collective if sharded.

    Exhaust it on every rank, and do not raise before: other ranks would wait in the next gathering.

    Args:
        model: wrapped or not. Of FSDP1 pass the outermost unit.
        prefix: yield only names that begin so. Nothing else is gathered.

    Yields:
        The plain model's name, the first name of the same tensor (another one where the two are tied), and the whole
        tensor, valid until the next one is requested.
    """
    model = _without_outer_wrappers(model)
    for unit_prefix, unit in _units(model):
        if isinstance(unit, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
                yield from _wanted(unit, unit_prefix, prefix)
        else:
            for name, first, tensor in _wanted(unit, unit_prefix, prefix):
                with _gathered(tensor) as whole:
                    yield name, first, whole


def _without_outer_wrappers(model: nn.Module) -> nn.Module:
    """The module beneath wrappers that do not matter to gathering; FSDP1's outermost unit does."""
    while not isinstance(model, FullyShardedDataParallel) and unwrapped(model) is not model:
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model


def _units(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """FSDP1's units with the prefixes of their names, outermost first, and the model itself if it is none."""
    units = [
        (f"{name}." if name else "", module)
        for name, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel)
    ]
    return units if isinstance(model, FullyShardedDataParallel) else [("", model), *units]


def _wanted(unit: nn.Module, unit_prefix: str, prefix: str) -> list[tuple[str, str, Tensor]]:
    """What :func:`whole_tensors` yields of one unit, as it is sharded now."""
    nested = {
        module for module in unit.modules() if module is not unit and isinstance(module, FullyShardedDataParallel)
    }
    named = [(clean_name(name), tensor) for name, tensor in own_tensors(unit, unit_prefix, nested)]
    firsts: dict[int, str] = {}
    return [(name, firsts.setdefault(id(tensor), name), tensor) for name, tensor in named if name.startswith(prefix)]


def own_tensors(module: nn.Module, prefix: str, stop: set[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, tied ones under each of their names, of all modules but those in ``stop``."""
    for name, parameter in module._parameters.items():
        # FSDP1's own tensor, in which the parameters lie.
        if parameter is not None and name != "_flat_param":
            yield prefix + name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield prefix + name, buffer
    for name, child in module._modules.items():
        if child is not None and child not in stop:
            yield from own_tensors(child, f"{prefix}{name}.", stop)


@contextmanager
def _gathered(tensor: Tensor) -> Iterator[Tensor]:
    if hasattr(tensor, "ds_tensor"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            yield tensor.detach()
    elif hasattr(tensor, "full_tensor"):
        yield _whole_of_dtensor(tensor)
    else:
        yield tensor.detach()


def _whole_of_dtensor(tensor: Any) -> Tensor:
    device = tensor.device_mesh.device_type
    # Offloaded to the CPU; the mesh's backend gathers on its own device alone.
    if tensor.device.type != device:
        tensor = tensor.to(device)
    with torch.no_grad():
        whole: Tensor = tensor.full_tensor().detach()
    return whole
