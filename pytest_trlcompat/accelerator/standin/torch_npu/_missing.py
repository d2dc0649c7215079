"""The error of the stand-in for a name that it lacks. It says that the module is a stand-in.

So the failure is known by its message as one of the software accelerator, and is never blamed on the library that asked
for the name. The error is an AttributeError, so ``hasattr`` and ``getattr`` with a default work as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

__all__ = ["lacking"]


def lacking(module: str) -> Callable[[str], NoReturn]:
    """A ``__getattr__`` for a module that its users call ``module``."""

    def missing(name: str) -> NoReturn:
        text = f"the software accelerator's stand-in for torch_npu has no '{module}.{name}'"
        raise AttributeError(text, name=name)

    return missing
