"""Garbage that ranks of the suites leave alone.

Runs inside the ranks; imports the stack only inside functions.
"""

from __future__ import annotations

import importlib
import types

__all__ = ["leave_garbage"]


def leave_garbage() -> None:
    """Have DeepSpeed and Accelerate look for no garbage in this process.

    DeepSpeed, 0.18.6 for one, does so some ten times while it builds a ZeRO-3 engine, to report the memory in use
    (``see_memory_usage``), and Accelerate when a training begins: 4 % of a cell's time, in ranks that train tiny models
    and end within seconds. Python's own collections go on.
    """
    for name in ("deepspeed.runtime.utils", "accelerate.utils.memory"):
        module = importlib.import_module(name)
        module.gc = types.SimpleNamespace(collect=lambda: 0)  # type: ignore[attr-defined]
