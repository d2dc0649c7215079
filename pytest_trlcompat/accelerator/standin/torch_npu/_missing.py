"""What the stand-in says where it is asked for a name that it has not: that it is a stand-in.

A failure is then known by its own words as one of the software accelerator, and never taken for one of the library that
asked. It is an AttributeError, so ``hasattr`` and ``getattr`` with a default answer as ever.
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
