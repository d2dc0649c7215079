"""What the device computed beside what the CPU computed: the first difference, down to the last bit."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["DEVICE", "difference", "tensors_of"]

DEVICE = torch.device("npu", 0)


def difference(expected: Any, found: Any, *, bits: bool = True, where: str = "") -> str | None:
    """The first thing in which the device's values differ from the CPU's, as text; None where all are equal.

    Args:
        bits: compare the numbers too, not only what describes them.
    """
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        return _between_tensors(expected, found, bits, where)
    if isinstance(expected, Exception) and isinstance(found, Exception):
        one, other = _message(expected), _message(found)
        return None if one == other else f"{where}: {other} instead of {one}"
    if type(expected) is not type(found):
        return f"{where}: {_named(found)} instead of {_named(expected)}"
    if isinstance(expected, Mapping):
        if list(expected) != list(found):
            return f"{where}: the keys {list(found)} instead of {list(expected)}"
        return _first(difference(expected[key], found[key], bits=bits, where=f"{where}[{key!r}]") for key in expected)
    if isinstance(expected, (list, tuple)):
        if len(expected) != len(found):
            return f"{where}: {len(found)} values instead of {len(expected)}"
        pairs = enumerate(zip(expected, found, strict=True))
        return _first(difference(one, other, bits=bits, where=f"{where}[{i}]") for i, (one, other) in pairs)
    if bits and isinstance(expected, (bool, int, float, complex, str)) and repr(expected) != repr(found):
        return f"{where}: {found!r} instead of {expected!r}"
    return None


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested lists, tuples, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_of(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_of(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield from tensors_of(getattr(value, entry.name))


def _first(differences: Iterable[str | None]) -> str | None:
    return next((found for found in differences if found is not None), None)


def _message(error: Exception) -> str:
    """The type of an exception and the first line of its text, with the CPU's name for either device."""
    text = re.sub(rf"{DEVICE}|{DEVICE.type}", "cpu", str(error))
    return f"{type(error).__name__}: {text}".splitlines()[0]


def _named(value: Any) -> str:
    return f"{type(value).__name__} {value}"[:200]


def _between_tensors(expected: torch.Tensor, found: torch.Tensor, bits: bool, where: str) -> str | None:
    device = DEVICE if expected.is_cpu else expected.device
    if found.device != device:
        return f"{where}: on {found.device} instead of {device}"
    for name, described in _DESCRIPTIONS.items():
        one, other = described(expected), described(found)
        if one != other:
            return f"{where}: {name} {other} instead of {one}"
    parts = _PARTS.get(expected.layout)
    if parts is not None:
        return _first(
            difference(getattr(expected, part)(), getattr(found, part)(), bits=bits, where=f"{where}.{part}")
            for part in parts
        )
    if not bits:
        return None
    one, other = _as_bytes(expected), _as_bytes(found)
    if torch.equal(one, other):
        return None
    unequal = int((one != other).any(dim=1).sum())
    return f"{where}: {unequal} of {len(one)} numbers differ{_largest(expected, found)}"


def _strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """None where no two elements can be told apart by them."""
    return tensor.stride() if tensor.layout == torch.strided and tensor.numel() > 1 else None


_DESCRIPTIONS = {
    "dtype": lambda tensor: tensor.dtype,
    "layout": lambda tensor: tensor.layout,
    "shape": lambda tensor: tuple(tensor.shape),
    "strides": _strides,
    "conjugate bit": lambda tensor: tensor.is_conj(),
    "negative bit": lambda tensor: tensor.is_neg(),
    "requires_grad": lambda tensor: tensor.requires_grad,
}

_COMPRESSED_ROWS = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS = ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _COMPRESSED_ROWS,
    torch.sparse_bsr: _COMPRESSED_ROWS,
    torch.sparse_csc: _COMPRESSED_COLUMNS,
    torch.sparse_bsc: _COMPRESSED_COLUMNS,
}


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """``(numel, itemsize)``, on the CPU."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype)  # contiguous() would keep odd strides of dimensions of size 1
    return plain.copy_(tensor.detach()).reshape(-1, 1).view(torch.uint8)


def _largest(expected: torch.Tensor, found: torch.Tensor) -> str:
    if not (expected.dtype.is_floating_point or expected.dtype.is_complex):
        return ""
    wide = torch.complex128 if expected.dtype.is_complex else torch.float64
    apart = (expected.detach().to(wide) - found.detach().cpu().to(wide)).abs()
    return f", by {apart.nan_to_num(nan=float('inf')).max().item():.3g} at most"
