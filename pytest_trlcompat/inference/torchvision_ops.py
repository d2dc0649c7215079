"""Lets torchvision be imported that was built for CUDA, beside a torch for CPUs: what a package index has, and a cell.

Its compiled part needs CUDA's libraries and is not loaded there, which torchvision takes for granted; but then it
describes operators that this part would have defined, and its import ends with ``operator torchvision::nms does not
exist``. Transformers' processors and vLLM's vision models import it for what is written in Python: images are resized
and normalized by torch. Here the operators' schemas are defined before, without anything that computes: a call of one
of them is an error of torch's (``Could not run 'torchvision::nms'``).

A copy of this file lies in a cell's environment and runs when an interpreter starts, see :func:`install`; it costs
nothing until torchvision is imported. Imports the standard library; torch inside a function.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import re
import shutil
import sys
from pathlib import Path
from typing import Any

__all__ = ["DISTRIBUTION", "install", "watch"]

DISTRIBUTION = "torchvision"
_COPY = "trlcompat_torchvision_ops"
_OPERATOR = re.compile(r'register_fake\("torchvision::(\w+)"\)')
"""In torchvision's descriptions; those behind a question for the compiled part are registered by another name."""
_DESCRIBED = "_meta_registrations.py"
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
"""Of ``nms`` and of its variant for quantized numbers."""


def install(site_packages: Path) -> None:
    """Put it into an environment, for every interpreter there.

    Raises:
        OSError: the system refused it.
    """
    shutil.copyfile(__file__, site_packages / f"{_COPY}.py")
    (site_packages / f"{_COPY}.pth").write_text(f"import {_COPY}; {_COPY}.watch()\n", encoding="utf-8")


def watch() -> None:
    """From now on, look at torchvision before it is imported; once, however often this is called."""
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Finds nothing itself: others find torchvision."""
        if fullname == DISTRIBUTION:
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(DISTRIBUTION)
            if spec is not None and spec.origin is not None:
                _define(Path(spec.origin).parent)


def _define(folder: Path) -> None:
    import torch

    built_for_cuda = re.search(r"^__version__ = '[^']*\+cu", (folder / "version.py").read_text(encoding="utf-8"), re.M)
    if torch.version.cuda is None and built_for_cuda:
        for name in _OPERATOR.findall((folder / _DESCRIBED).read_text(encoding="utf-8")):
            torch.library.define(f"torchvision::{name}", _SCHEMA)
