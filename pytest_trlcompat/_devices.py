"""The GPUs of this machine, without CUDA or torch."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["cuda_initialized", "visible_gpus"]


def visible_gpus(environ: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """Number of NVIDIA GPUs that a process may use, counted without CUDA."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # CUDA takes the devices in front of the first that is none. Slurm sets NoDevFiles for a job without GPUs.
        entries = (entry.strip() for entry in visible.split(","))
        return len([*itertools.takewhile(lambda entry: entry not in ("", "-1", "NoDevFiles"), entries)])
    # Numbered ones alone: nvidiactl and nvidia-uvm are no GPUs. Under WSL 2 there is one device, dxg, for all.
    return sum(node.name[6:].isdigit() for node in devices.glob("nvidia*")) or int((devices / "dxg").exists())


def cuda_initialized(library: str = "libcuda.so.1") -> bool:
    """Whether this process has initialised CUDA in any way. If so, its forked children cannot use it."""
    try:
        # With RTLD_NOLOAD the driver is asked only if this process has loaded it already.
        driver = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    # To ask it does not initialise it: until ``cuInit``, every function of its API returns CUDA_ERROR_NOT_INITIALIZED
    # (https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__INITIALIZE.html).
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _CUDA_ERROR_NOT_INITIALIZED)


_CUDA_ERROR_NOT_INITIALIZED = 3
