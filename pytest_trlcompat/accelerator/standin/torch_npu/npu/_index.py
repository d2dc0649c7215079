"""What may stand for a device in a call of ``torch.npu``, and which one it means."""

from __future__ import annotations

from typing import TypeAlias

import torch

from torch_npu import _C

__all__ = ["Device", "index_of"]

Device: TypeAlias = int | str | torch.device | None


def index_of(device: Device) -> int:
    """The index of ``device``; the current one for None, a negative index, or a device without one."""
    if device is None:
        return _C.current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    return _C.current_device() if index is None or index < 0 else index
