"""Refuses another user's process that stands in for a rank in PyTorch's own gloo: on the device ``cpu``, beside NCCL.

The software accelerator has its own way to gloo, and looks there (``torch_npu._peers``, which is used here). Runs
inside the ranks.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

__all__ = ["refuse_strangers"]

_SOURCE = Path(__file__).parents[1] / "accelerator" / "standin" / "torch_npu" / "_peers.py"


def refuse_strangers() -> None:
    """From now on, have each process group of gloo look at whom it is connected to before it is used.

    Where there is no ``torch.distributed``, or no gloo in it, nothing is done.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError:  # the function gets the same error, if it needs torch
        return
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return
    only_own = _only_own()
    gloo = torch.distributed.ProcessGroupGloo
    connect = gloo.__init__

    # gloo connects all ranks within its constructor, so whoever is connected is known before anything is exchanged.
    def connect_and_look(self: Any, *args: Any, **kwargs: Any) -> None:
        with only_own():
            connect(self, *args, **kwargs)

    gloo.__init__ = connect_and_look


def _only_own() -> Callable[[], AbstractContextManager[None]]:
    """The function of the stand-in's file, loaded by its path: its package is not on this rank's path."""
    spec = importlib.util.spec_from_file_location("pytest_trlcompat.launch._peers", _SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    only_own: Callable[[], AbstractContextManager[None]] = module.only_own
    return only_own
