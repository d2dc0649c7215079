"""Copies of this project's folders, in which tests run programs of it."""

from __future__ import annotations

import shutil
from pathlib import Path

__all__ = ["copy_with_bytecode"]

_BEING_WRITTEN = "*.pyc.*"
"""Files that another process renames in a moment."""


def copy_with_bytecode(source: Path, target: Path) -> None:
    """Copy a folder of modules with their bytecode: to compile a copy of the package takes some seconds.

    It holds for the copy, too, since a module's time is copied with it.
    """
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(_BEING_WRITTEN))
