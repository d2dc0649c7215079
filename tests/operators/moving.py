"""The CPU's samples, made over for the accelerator as they are: shared memory, strides, offsets and lazy bits too."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["Mover"]


class Mover:
    """Moves nested values to a device; tensors that share memory on the CPU do so there as well."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.names = 0
        """How many of the moved values say where they are."""
        self._storages: dict[int, torch.UntypedStorage] = {}

    def move(self, value: Any) -> Any:
        """``value`` with its tensors copied, and with what names the CPU naming the device instead."""
        if isinstance(value, torch.Tensor):
            self.names += 1
            return self._move_tensor(value)
        if value == "cpu" or value == torch.device("cpu"):
            self.names += 1
            return self.device if isinstance(value, torch.device) else str(self.device)
        if isinstance(value, Mapping):
            kind: Any = type(value)
            return kind((key, self.move(part)) for key, part in value.items())
        if isinstance(value, (list, tuple)):
            parts = [self.move(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [entry.name for entry in dataclasses.fields(value)]
            return dataclasses.replace(value, **{name: self.move(getattr(value, name)) for name in names})
        return value

    def _move_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        source = tensor.detach()
        if source.layout != torch.strided:
            return source.to(self.device, copy=True).requires_grad_(tensor.requires_grad)
        moved = torch.empty(0, dtype=source.dtype, device=self.device)
        moved.set_(self._storage(source), source.storage_offset(), source.shape, source.stride())
        if source.is_conj():
            moved = moved.conj()
        if source.is_neg():
            moved = torch._neg_view(moved)
        return moved.detach().requires_grad_(tensor.requires_grad)

    def _storage(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            everything = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._storages[storage._cdata] = everything.to(self.device, copy=True).untyped_storage()
        return self._storages[storage._cdata]
