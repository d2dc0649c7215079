"""Do ranks that hold the same parameter hold the same values?

The case of BLOOM-176B (TrainCheck, OSDI 2025; DeepSpeed pull 1801): layer norms that each rank of a tensor-parallel
group holds whole drifted apart, and nobody saw it for months. Gradients that are not reduced (a model moved after DDP
wrapped it, a forward that goes past the wrapper) and a link that loses data end the same way.

Nothing is gathered: a rank computes one number for each parameter, and ranks exchange one number per group, unless
these differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from pytest_trlcompat.checks._models import local_shard, named_parameters, unwrapped, without
from pytest_trlcompat.checks._prints import fingerprints, has_bits, sample
from pytest_trlcompat.checks._ranks import CheckError, gather_from_ranks, listed, rank, together, world_size

__all__ = ["check_replicas"]

_Part = tuple[int, ...]
"""Which part of a parameter a rank holds. Ranks that hold the same part of it must hold the same values."""


def check_replicas(
    model: nn.Module, *, ignore: Sequence[str] = (), most: int | None = None, what: str = "the model"
) -> dict[str, int]:
    """Ranks that hold the same parameter, or the same shard of it, hold it bitwise equal.

    Under DDP, ZeRO-1 and ZeRO-2 these are all parameters. If parameters are sharded, these are the ones that several
    ranks still hold: whole layer norms between parallel layers, the replicas of a hybrid mesh, small parameters that
    ZeRO-3 leaves whole. Left out are experts that live on one rank alone (DeepSpeed's ``allreduce = False``),
    Megatron's parallel tensors, and tensors without a plain storage (torchao's quantised ones). Collective.

    Args:
        model: wrapped or not, sharded or not.
        ignore: shell patterns of parameters' names to leave out, such as ones that differ on purpose.
        most: elements of each parameter to compare, evenly spread over it; by default all.
        what: what messages call the model.

    Returns:
        Numbers of parameters: ``compared``, which another rank holds as well, and ``alone``, which none does.

    Raises:
        CheckError: on every rank, with names and ranks.
    """
    size = world_size()
    with together(f"whether ranks agree on {what}"):
        parts = [] if size == 1 else _parts(model, ignore)
        values = fingerprints([tensor if most is None else sample(tensor, most) for _, _, tensor in parts])
        mine = [(name, part, value) for (name, part, _), value in zip(parts, values, strict=True)]
    digests: dict[_Part, int] = {}
    for name, part, value in mine:
        digests[part] = hash((digests.get(part, 0), _number(name), value))
    everyone = gather_from_ranks(digests)
    shared = {part for part in digests if sum(part in digests_of_rank for digests_of_rank in everyone) > 1}
    compared = sum(part in shared for _, part, _ in mine)
    if any(
        len({digests_of_rank[part] for digests_of_rank in everyone if part in digests_of_rank}) > 1
        for part in {part for digests_of_rank in everyone for part in digests_of_rank}
    ):
        _name_them(gather_from_ranks(mine), what)
    return {"compared": compared, "alone": len(mine) - compared}


def _number(name: str) -> int:
    """A number that is the same in every process; strings are hashed differently in each."""
    return int.from_bytes(name.encode()[-64:], "big")


def _name_them(everyone: Sequence[Sequence[tuple[str, _Part, int]]], what: str) -> None:
    """Raise with the names that differ; the text is the same on every rank, since all see the same values."""
    held: dict[tuple[str, _Part], dict[int, int]] = {}
    for number, mine in enumerate(everyone):
        for name, part, value in mine:
            held.setdefault((name, part), {})[number] = value
    different = {name: ranks for (name, _), ranks in held.items() if len(set(ranks.values())) > 1}
    if not different:
        # Ranks hold different parameters, like stages of a pipeline.
        return
    first = next(iter(different.values()))
    odd = [number for number, value in first.items() if value != next(iter(first.values()))]
    raise CheckError(
        f"expected the ranks to hold the same values in {what}, but they differ in {listed(different)}; of the first, "
        f"rank {min(first)}'s value is not that of rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))}. Are "
        "gradients reduced for all of them: was the model moved or replaced after it was wrapped, is a part called "
        "past the wrapper, does each rank clip or skip alone?"
    )


def _parts(model: nn.Module, ignore: Sequence[str]) -> list[tuple[str, _Part, Tensor]]:
    """Name, part and local tensor of each parameter that ranks may share."""
    units = _units_of_fsdp1(model)
    parts = []
    for name, parameter in without(named_parameters(model), ignore):
        if _is_of_one_rank(parameter):
            continue
        part, tensor = _part(parameter, units)
        if tensor.numel() and has_bits(tensor.detach()):
            parts.append((name, part, tensor.detach()))
    return parts


def _is_of_one_rank(parameter: Any) -> bool:
    """DeepSpeed's experts and Megatron's parallel tensors, each of which one rank of a group holds alone."""
    return (
        getattr(parameter, "allreduce", True) is False
        or bool(getattr(parameter, "tensor_model_parallel", False))
        or bool(getattr(parameter, "model_parallel", False))
    )


def _part(parameter: Any, units: dict[int, _Part]) -> tuple[_Part, Tensor]:
    if hasattr(parameter, "ds_tensor"):  # ZeRO-3
        if getattr(parameter, "ds_persist", False) and parameter.data.numel() == parameter.ds_numel:
            return (), parameter.data  # small, and kept whole on every rank
        return (_rank_in(getattr(parameter, "ds_process_group", None)),), local_shard(parameter)
    if hasattr(parameter, "to_local"):  # FSDP2 or tensor parallel
        at = parameter.device_mesh.get_coordinate() or ()
        placed = enumerate(zip(at, parameter.placements, strict=True))
        sharded = [number for axis, (place, how) in placed if not how.is_replicate() for number in (axis, place)]
        return tuple(sharded), local_shard(parameter)
    return units.get(id(parameter), ()), parameter.data


def _units_of_fsdp1(model: nn.Module) -> dict[int, _Part]:
    """The parts that this rank holds of what FSDP1 shards, by the identity of the parameter."""
    parts: dict[int, _Part] = {}
    for unit in FullyShardedDataParallel.fsdp_modules(_outermost(model)):
        whole = unit.sharding_strategy.name == "NO_SHARD"
        part = () if whole else (_rank_in(unit.process_group),)
        # Inner units come later, and overwrite what an outer one said of their parameters.
        parts.update(dict.fromkeys(map(id, unit.parameters()), part))
    return parts


def _outermost(model: nn.Module) -> nn.Module:
    while not isinstance(model, FullyShardedDataParallel) and unwrapped(model) is not model:
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model


def _rank_in(group: Any) -> int:
    if group is None:
        return rank()
    return int(torch.distributed.get_rank(group))
