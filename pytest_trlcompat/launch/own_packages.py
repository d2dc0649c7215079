"""The packages of a project that the warm server imports before it forks: ``trlcompat_preload``.

An import that would not survive the fork, or that ranks would inherit what a fresh process does not have from, is
refused, with what it did. Runs in the warm server, after the stack was imported.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

from pytest_trlcompat._devices import cuda_initialized

__all__ = ["PreloadError", "import_all"]

_THREADS_END = 1.0
"""Seconds that threads have to end which an import has started."""
_POLL = 0.02


class PreloadError(RuntimeError):
    """A package cannot be imported before the fork."""


def import_all(names: Iterable[str]) -> dict[str, float]:
    """Import each module, in this order; returns the seconds that it took.

    Raises:
        PreloadError: it cannot be imported; or importing it has started a thread that goes on, used a device, or
            changed torch's default dtype or device. It names the module and what it did.
    """
    return {name: _import(name) for name in names}


def _import(name: str) -> float:
    started, threads, defaults = time.monotonic(), _threads(), _defaults()
    try:
        importlib.import_module(name)
    except Exception as error:
        raise PreloadError(_text(name, f"failed: {type(error).__name__}: {error}")) from error
    seconds = time.monotonic() - started
    if new := _new_threads(threads):
        raise PreloadError(_text(name, f"started {new}, which ranks forked from here would not have"))
    if used := _devices_in_use():
        raise PreloadError(_text(name, f"used {used}, which ranks would share or could not use"))
    if _defaults() != defaults:
        raise PreloadError(_text(name, f"changed torch's default dtype and device from {defaults} to {_defaults()}"))
    return seconds


def _text(name: str, what: str) -> str:
    return (
        f"trlcompat_preload: importing {name} {what}. Take {name} out of trlcompat_preload, and each rank imports it "
        "when its function does; or move that out of its import"
    )


def _threads() -> set[str]:
    # The kernel's list, since threading does not know threads of native code.
    return set(os.listdir("/proc/self/task"))


def _new_threads(before: set[str]) -> str:
    """``2 threads (Thread-1, native)``; empty if those that an import has started have ended."""
    deadline = time.monotonic() + _THREADS_END
    while (new := _threads() - before) and time.monotonic() < deadline:
        time.sleep(_POLL)
    if not new:
        return ""
    names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    called = ", ".join(sorted(names.get(number, "native") for number in new))
    return f"{len(new)} thread{'s' if len(new) > 1 else ''} ({called})"


def _devices_in_use() -> str:
    if cuda_initialized():
        return "CUDA"
    npu: Any = getattr(sys.modules.get("torch"), "npu", None)
    if npu is None or "torch_npu" not in sys.modules:
        return ""
    # The most that was ever allocated: what an import frees again has used the device all the same.
    counts = {index: npu.max_memory_allocated(index) for index in range(npu.device_count())}
    used = [f"npu:{index} ({count} bytes)" for index, count in counts.items() if count]
    return f"the accelerator {', '.join(used)}" if used else ""


def _defaults() -> str:
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype"):
        return ""
    device = getattr(torch, "get_default_device", lambda: "cpu")  # torch 2.3 and later
    return f"{torch.get_default_dtype()} and {device()}"
