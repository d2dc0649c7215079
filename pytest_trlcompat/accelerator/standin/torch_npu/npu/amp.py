"""``torch.npu.amp``: torch's own mixed precision, with the device filled in."""

from __future__ import annotations

from typing import Any

import torch

from torch_npu._missing import lacking

__all__ = ["GradScaler", "autocast"]


class GradScaler(torch.amp.GradScaler):
    def __init__(self, **options: Any) -> None:
        super().__init__("npu", **options)


def autocast(**options: Any) -> torch.autocast:
    return torch.autocast("npu", **options)


__getattr__ = lacking("torch.npu.amp")
