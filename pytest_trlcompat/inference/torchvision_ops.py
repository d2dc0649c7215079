"""Makes a torchvision that was built for CUDA importable with a torch for CPUs: a cell has the builds of the index.

Its compiled part needs CUDA's libraries and is not loaded there, which torchvision takes for granted; but then it
describes operators that this part would have defined, and its import ends with ``operator torchvision::nms does not
exist``. Transformers' processors and vLLM's vision models import it for what is written in Python: images are resized
and normalized by torch. Here the operators' schemas are defined before, without anything that computes: a call of one
of them is an error of torch's (``Could not run 'torchvision::nms'``).

What waits for the import lies in a cell's environment and runs when an interpreter starts (:mod:`.torchvision_watch`,
see :func:`install`); what is defined is said here, in the project that the process imports.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

__all__ = ["DISTRIBUTION", "define_operators", "install"]

DISTRIBUTION = "torchvision"
_WATCH = "trlcompat_torchvision_ops"
_SOURCE = Path(__file__).with_name("torchvision_watch.py")
_OPERATOR = re.compile(r'register_fake\("torchvision::(\w+)"\)')
"""In torchvision's descriptions; those behind a question for the compiled part are registered by another name."""
_DESCRIBED = "_meta_registrations.py"
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
"""Of ``nms`` and of its variant for quantized numbers."""


def install(site_packages: Path) -> None:
    """Have every interpreter of an environment watch for torchvision.

    Raises:
        OSError: the system refused it.
    """
    shutil.copyfile(_SOURCE, site_packages / f"{_WATCH}.py")
    (site_packages / f"{_WATCH}.pth").write_text(f"import {_WATCH}; {_WATCH}.watch()\n", encoding="utf-8")


def define_operators(folder: Path) -> None:
    """Define what the compiled part of the torchvision in ``folder`` would have, unless that part can be loaded."""
    import torch

    built_for_cuda = re.search(r"^__version__ = '[^']*\+cu", (folder / "version.py").read_text(encoding="utf-8"), re.M)
    if torch.version.cuda is None and built_for_cuda:
        for name in _OPERATOR.findall((folder / _DESCRIBED).read_text(encoding="utf-8")):
            torch.library.define(f"torchvision::{name}", _SCHEMA)
