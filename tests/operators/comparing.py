"""What the device computed beside what the CPU computed: the first difference, down to the last bit."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

__all__ = ["DEVICE", "Difference", "difference", "tensors_of"]

DEVICE = torch.device("npu", 0)


class Difference(NamedTuple):
    """One thing in which the device is not the CPU."""

    text: str
    of_numbers: bool = False
    """Nothing but numbers differs: dtype, shape, strides and all else are the CPU's."""


def difference(expected: Any, found: Any) -> Difference | None:
    """The first thing in which the device's values differ from the CPU's, numbers last; None where all are equal."""
    numbers = None
    for one in _differences(expected, found, ""):
        if not one.of_numbers:
            return one
        numbers = numbers or one
    return numbers


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


def _differences(expected: Any, found: Any, where: str) -> Iterator[Difference]:
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        yield from _between_tensors(expected, found, where)
    elif isinstance(expected, Exception) and isinstance(found, Exception):
        one, other = _message(expected), _message(found)
        if one != other:
            yield Difference(f"{where}: {other} instead of {one}")
    elif type(expected) is not type(found):
        yield Difference(f"{where}: {_named(found)} instead of {_named(expected)}")
    elif isinstance(expected, Mapping):
        if list(expected) != list(found):
            yield Difference(f"{where}: the keys {list(found)} instead of {list(expected)}")
            return
        for key in expected:
            yield from _differences(expected[key], found[key], f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        if len(expected) != len(found):
            yield Difference(f"{where}: {len(found)} values instead of {len(expected)}")
            return
        for i, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from _differences(one, other, f"{where}[{i}]")
    elif isinstance(expected, (bool, int, float, complex, str)) and repr(expected) != repr(found):
        yield Difference(f"{where}: {found!r} instead of {expected!r}")


def _message(error: Exception) -> str:
    """The type of an exception and the first line of its text, with the CPU's name for either device."""
    text = re.sub(rf"{DEVICE}|{DEVICE.type}", "cpu", str(error))
    return f"{type(error).__name__}: {text}".splitlines()[0]


def _named(value: Any) -> str:
    return f"{type(value).__name__} {value}"[:200]


def _between_tensors(expected: torch.Tensor, found: torch.Tensor, where: str) -> Iterator[Difference]:
    device = DEVICE if expected.is_cpu else expected.device
    if found.device != device:
        yield Difference(f"{where}: on {found.device} instead of {device}")
    for name, described in _DESCRIPTIONS.items():
        one, other = described(expected), described(found)
        if one != other:
            yield Difference(f"{where}: {name} {other} instead of {one}")
    if expected.layout != found.layout or expected.shape != found.shape or expected.dtype != found.dtype:
        return
    if expected.layout in _PARTS:
        for part in _PARTS[expected.layout]:
            yield from _differences(getattr(expected, part)(), getattr(found, part)(), f"{where}.{part}")
        return
    one, other = _as_bytes(expected), _as_bytes(found)
    if not torch.equal(one, other):
        unequal = int((one != other).any(dim=1).sum())
        text = f"{where}: {unequal} of {len(one)} numbers differ{_largest(expected, found)}"
        yield Difference(text, of_numbers=True)


def _strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """None where no two elements can be distinguished by them."""
    return tensor.stride() if tensor.layout == torch.strided and tensor.numel() > 1 else None


_DESCRIPTIONS: dict[str, Callable[[Any], object]] = {
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
