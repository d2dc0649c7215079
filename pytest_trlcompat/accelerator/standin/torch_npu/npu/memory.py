"""Memory of one device in this process, in bytes. Nothing is cached: what is reserved is what is allocated."""

from __future__ import annotations

from typing import Any

from torch_npu import _C
from torch_npu._missing import lacking
from torch_npu.npu._index import Device, index_of

__all__ = [
    "empty_cache",
    "ipc_collect",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_memory_stats",
]

TOTAL_BYTES = 8 << 30
"""What the device says it has: constant, so that nothing sizes itself by the host's memory."""


def memory_allocated(device: Device = None) -> int:
    return _C.memory_allocated(index_of(device))


def max_memory_allocated(device: Device = None) -> int:
    """The most that was allocated at once since the process began, or since the last reset."""
    return _C.max_memory_allocated(index_of(device))


def reset_peak_memory_stats(device: Device = None) -> None:
    _C.reset_peak_memory_stats(index_of(device))


def reset_accumulated_memory_stats(device: Device = None) -> None:
    pass


def memory_stats(device: Device = None) -> dict[str, Any]:
    current, peak = memory_allocated(device), max_memory_allocated(device)
    return {
        f"{kind}_bytes.all.{name}": value
        for kind in ("allocated", "reserved", "active")
        for name, value in (("current", current), ("peak", peak))
    }


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """For people. FSDP1 asks the first rank for it when ``TORCH_DISTRIBUTED_DEBUG`` is ``DETAIL``."""
    return f"allocated: {memory_allocated(device)} bytes, at most {max_memory_allocated(device)}"


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Free and total memory."""
    return max(TOTAL_BYTES - memory_allocated(device), 0), TOTAL_BYTES


def empty_cache() -> None:
    pass


def ipc_collect() -> None:
    pass


memory_reserved = memory_cached = memory_allocated
max_memory_reserved = max_memory_cached = max_memory_allocated
reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats


__getattr__ = lacking("torch.npu.memory")
