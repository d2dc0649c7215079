"""This project's files as they travel to the nodes: package, suites and fixtures, nothing else of the checkout."""

from __future__ import annotations

import fnmatch
import hashlib
import shutil
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout

__all__ = ["copy_project", "digest"]

_FOLDERS = ("pytest_trlcompat", "suites", "fixtures")
_METADATA = ("METADATA", "entry_points.txt")
"""Of the installed package: by its entry point pytest finds the plugin."""


# For type checkers alone, and written anew where the project is installed, maybe between copying and comparing.
_LEFT_OUT = ("__pycache__", ".*", "__init__.pyi")


def digest(layout: Layout) -> str:
    """A digest of the files that travel, of a checkout or where they have arrived."""
    hasher = hashlib.sha256()
    for name in _FOLDERS:
        for path in sorted((layout.root / name).rglob("*")):
            parts = path.relative_to(layout.root).parts
            left_out = any(fnmatch.fnmatch(part, pattern) for part in parts for pattern in _LEFT_OUT)
            if path.is_file() and not left_out:
                hasher.update("/".join(parts).encode() + b"\0" + path.read_bytes() + b"\0")
    return hasher.hexdigest()[:16]


def copy_project(layout: Layout, folder: Path) -> None:
    """Copy this project's files into an empty folder, which can then be imported from.

    Raises:
        MatrixError: this project is not installed where this runs.
    """
    for name in _FOLDERS:
        shutil.copytree(layout.root / name, folder / name, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    try:
        installed = distribution("pytest-trlcompat")
    except PackageNotFoundError as error:
        raise MatrixError(f"pytest-trlcompat is not installed where the engine runs: {error}") from error
    metadata = folder / f"pytest_trlcompat-{installed.version}.dist-info"
    metadata.mkdir()
    for name in _METADATA:
        (metadata / name).write_text(installed.read_text(name) or "", encoding="utf-8")
