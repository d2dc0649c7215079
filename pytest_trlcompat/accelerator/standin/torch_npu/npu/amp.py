"""``torch.npu.amp``: torch's own mixed precision, with the device filled in."""

from __future__ import annotations

import functools

import torch

from torch_npu._missing import lacking

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]


class GradScaler(torch.amp.GradScaler):
    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        dynamic: bool = True,
        enabled: bool = True,
    ) -> None:
        if not dynamic:
            lacking("torch.npu.amp.GradScaler")("dynamic")
        super().__init__("npu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)


def autocast(
    enabled: bool = True, dtype: torch.dtype | None = None, cache_enabled: bool | None = None
) -> torch.autocast:
    return torch.autocast("npu", dtype, enabled, cache_enabled)


# DeepSpeed's linear layer under ZeRO-3 takes these where there are any, and else runs as without autocast.
custom_fwd = functools.partial(torch.amp.custom_fwd, device_type="npu")
custom_bwd = functools.partial(torch.amp.custom_bwd, device_type="npu")

__getattr__ = lacking("torch.npu.amp")
