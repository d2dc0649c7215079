"""The GPUs of this machine, without CUDA or torch. Imports only the standard library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["visible_gpus"]


def visible_gpus(environ: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """Number of NVIDIA GPUs that a process may use, counted without CUDA."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1", "NoDevFiles")])
    return sum(node.name[6:].isdigit() for node in devices.glob("nvidia*")) or int((devices / "dxg").exists())
