"""Waits in an interpreter for torchvision, and has this project prepare it: :mod:`.torchvision_ops` says what and why.

A copy of this file lies in environments that several checkouts may share, so it holds no more than the way to the
project: which one that is, the process that imports torchvision decides by its own path. It costs nothing until then.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from pathlib import Path
from typing import Any

__all__ = ["watch"]

_WATCHED = "torchvision"


def watch() -> None:
    """From now on, look at torchvision before it is imported; once, however often this is called."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Finds nothing itself: others find torchvision."""
        if fullname == _WATCHED:
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(_WATCHED)
            if spec is not None and spec.origin is not None:
                from pytest_trlcompat.inference import torchvision_ops

                torchvision_ops.define_operators(Path(spec.origin).parent)
