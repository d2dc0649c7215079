"""Load the software accelerator with torch 2.4, which does not load a backend by itself as later releases do.

Python imports this module when it starts, because it lies on ``PYTHONPATH`` in front of everything else. So the module
runs the ``sitecustomize`` that it hides, and has torch_npu imported after torch.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as everybody else does, and has torch_npu imported when torch has been."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch" or os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
            return None
        # Whoever only looks whether torch is there, by find_spec, loads nothing: this stays until torch is loaded.
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((candidate for candidate in specs if candidate is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                load(module)
                importlib.import_module("torch_npu")

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _run_the_hidden_one() -> None:
    path = [folder for folder in sys.path if os.path.abspath(folder or os.curdir) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        # Not put into sys.modules, where this module has the name already.
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# First, since the hidden one may import torch.
sys.meta_path.insert(0, _AfterTorch())
_run_the_hidden_one()
