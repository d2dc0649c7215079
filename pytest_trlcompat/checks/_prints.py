"""Fingerprints of tensors: whether two are equal, without keeping or sending either."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["fingerprint_of_batch", "fingerprints", "has_bits", "sample"]

_CHUNK = 1 << 22
"""Elements of 8 bytes that a fingerprint processes at once."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = -7046029254386353131
"""2**64 divided by the golden ratio, as a signed number: it spreads the weights over all 64 bits."""


def has_bits(tensor: Tensor) -> bool:
    """Whether a tensor has one plain storage to read: torchao's quantised ones are made of several tensors."""
    return tensor.device.type != "meta" and tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)


def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """Of each tensor a weighted sum, modulo 2**64, of its bits; weights are odd, so that no change of one cancels.

    A fingerprint is 0 for zeros, and equal for equal tensors of one shape and type, in every process and on every
    device. A tensor is read in pieces of 32 MiB, and the numbers are brought to the host in one copy for each device.
    """
    prints = [_fingerprint(tensor) for tensor in tensors]
    values = [0] * len(prints)
    for device in {number.device for number in prints}:
        indices = [index for index, number in enumerate(prints) if number.device == device]
        for index, value in zip(indices, torch.stack([prints[index] for index in indices]).tolist(), strict=True):
            values[index] = value
    return values


def _fingerprint(tensor: Tensor) -> Tensor:
    bits = _bits(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        piece = bits[start : start + _CHUNK].to(torch.int64)
        total += (piece * _weights(start, piece.numel(), tensor.device)).sum()
    return total


def sample(tensor: Tensor, most: int) -> Tensor:
    """At most ``most`` elements of a tensor, evenly spread over it, flat; the same ones each time."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // most))] if flat.numel() else flat


def fingerprint_of_batch(batch: Any, most: int = 1 << 16) -> int | None:
    """One number for the tensors that a batch holds under names, by at most ``most`` elements of each.

    Returns:
        ``None`` where the batch is no mapping with tensors. Equal batches have equal numbers, in every process.
    """
    if not isinstance(batch, Mapping):
        return None
    tensors = {
        str(name): tensor
        for name, tensor in batch.items()
        if isinstance(tensor, Tensor) and tensor.numel() and has_bits(tensor)
    }
    if not tensors:
        return None
    names = sorted(tensors)
    values = fingerprints([sample(tensors[name], most) for name in names])
    text = " ".join(f"{name} {tuple(tensors[name].shape)} {value}" for name, value in zip(names, values, strict=True))
    return zlib.crc32(text.encode())


def _bits(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.int8)
    return tensor.detach().contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()])


def _weights(start: int, count: int, device: torch.device) -> Tensor:
    weights = torch.arange(start, start + count, dtype=torch.int64, device=device)
    return weights.mul_(_ODD).bitwise_or_(1)
