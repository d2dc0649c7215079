"""Peak memory of the accelerator and the host, in bytes.

Does not import torch, but uses it if the process has: only then is an accelerator in use.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pytest_trlcompat.checks._ranks import CheckError, together

__all__ = ["Memory", "check_memory", "read_memory"]

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Memory:
    """Memory of this process, in bytes.

    Attributes:
        accelerator: allocated on this process's current accelerator by torch; 0 if there is none.
        accelerator_peak: the most of it since the process began or the peak was last reset.
        host: resident now.
        host_peak: the most that was resident since the process began.
    """

    accelerator: int
    accelerator_peak: int
    host: int
    host_peak: int

    def as_logs(self) -> dict[str, float]:
        """For a trainer's log: ``memory/accelerator_bytes`` and so on."""
        return {f"memory/{name}_bytes": float(value) for name, value in asdict(self).items()}


def read_memory() -> Memory:
    """Memory of this process now; resets nothing. Takes some tens of microseconds."""
    torch = sys.modules.get("torch")
    device = None if torch is None else _device_module(torch)
    host, host_peak = _host()
    return Memory(
        accelerator=0 if device is None else int(device.memory_allocated()),
        accelerator_peak=0 if device is None else int(device.max_memory_allocated()),
        host=host,
        host_peak=host_peak,
    )


def check_memory(*, accelerator_limit: int | None = None, host_limit: int | None = None) -> Memory:
    """Neither peak is above its limit on any rank; collective if there are several ranks.

    Args:
        accelerator_limit: of :attr:`Memory.accelerator_peak`, bytes.
        host_limit: of :attr:`Memory.host_peak`, bytes, for this process and not for all of a machine's.

    Raises:
        CheckError: on every rank, with the measured and the allowed bytes.
    """
    limits = {"accelerator": accelerator_limit, "host": host_limit}
    with together("peak memory"):
        memory = read_memory()
        problems = [
            f"the {where}'s peak is {_in_words(peak)} of {_in_words(limit)} allowed"
            for where, limit in limits.items()
            if limit is not None and (peak := getattr(memory, f"{where}_peak")) > limit
        ]
        if problems:
            raise CheckError("expected memory within its limits, but " + "; ".join(problems))
    return memory


@functools.cache
def _device_module(torch: Any) -> Any:
    """``torch.cuda``, ``torch.npu`` or whatever the accelerator of this torch is; ``None`` for the CPU alone."""
    modules = (getattr(torch, name, None) for name in _device_names(torch))
    return next(
        (
            module
            for module in modules
            if module is not None and hasattr(module, "max_memory_allocated") and module.is_available()
        ),
        None,
    )


def _device_names(torch: Any) -> list[str]:
    accelerator = getattr(torch, "accelerator", None)  # torch 2.6 and later
    current = accelerator.current_accelerator() if accelerator is not None else None
    return [*([] if current is None else [current.type]), "cuda", "npu", "xpu", "mps"]


def _host() -> tuple[int, int]:
    """Resident bytes now, and at most."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return _host_by_rusage()
    kibibytes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS:", "VmHWM:"))}
    return int(kibibytes["VmRSS"]) * 1024, int(kibibytes["VmHWM"]) * 1024


def _host_by_rusage() -> tuple[int, int]:
    """The peak, twice: without /proc nothing else is known."""
    import resource

    # In bytes on macOS, in KiB elsewhere.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak, peak


def _in_words(count: int) -> str:
    return f"{count} bytes ({count / 2**20:.0f} MiB)"
