"""Pinned memory without naming a device, for torch 2.4, which takes it for CUDA's there.

From torch 2.5 on the current accelerator is asked.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["register"]


def register() -> None:
    if torch.__version__ >= (2, 5):
        return
    for name in ("pin_memory", "is_pinned"):
        setattr(torch.Tensor, name, _on_this_device(getattr(torch.Tensor, name)))


def _on_this_device(method: Any) -> Any:
    @functools.wraps(method)
    def call(tensor: torch.Tensor, device: Any = "npu") -> Any:
        return method(tensor, device)

    return call
