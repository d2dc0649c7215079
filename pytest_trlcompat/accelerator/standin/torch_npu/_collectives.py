"""The process group backend ``hccl``: gloo's collectives on the device's memory, in order.

Ranks compare every collective before they enter it: a mismatch fails at once and names both, where it would otherwise
wait for the timeout, abort a rank, or pass.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from torch_npu import _C

__all__ = ["register"]

# For the project's own test alone, which shows what ordering is for: collectives then complete as gloo's do.
UNORDERED_VARIABLE = "TRLCOMPAT_UNORDERED_COLLECTIVES"
# What comparing costs, about a tenth of a small ZeRO-3 training, can be saved where nothing is in doubt.
COMPARE_VARIABLE = "TRLCOMPAT_COMPARE_COLLECTIVES"


def register() -> None:
    dist.Backend.register_backend("hccl", _create, devices=["npu"])


def _create(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroup:
    ordered = os.environ.get(UNORDERED_VARIABLE, "0") in ("", "0")
    comparing = os.environ.get(COMPARE_VARIABLE, "1") not in ("", "0")
    return _C.new_backend(_gloo(store, rank, world_size, timeout), ordered, comparing)


def _gloo(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return dist.ProcessGroupGloo(store, rank, world_size, timeout)
    # All ranks are on this host. Left to itself gloo resolves the host's name, which fails on many a laptop.
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, world_size, options)
