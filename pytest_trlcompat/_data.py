"""Finds the suites and the fixtures: inside the installed package, or next to it in a checkout.

Imports nothing but the standard library.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["fixtures", "suites"]

_PACKAGE = Path(__file__).resolve().parent


def fixtures() -> Path:
    """The folder of ``matrix.toml``, the locks and the configurations."""
    return _find("fixtures", "matrix.toml")


def suites() -> Path:
    """The folder that holds one test module per known issue."""
    return _find("suites", "conftest.py")


def _find(name: str, landmark: str) -> Path:
    for parent in (_PACKAGE, _PACKAGE.parent):
        folder = parent / name
        if (folder / landmark).is_file():
            return folder
    raise FileNotFoundError(
        f"pytest-trlcompat's folder '{name}' is neither in {_PACKAGE} nor next to it: the installation is "
        "incomplete, install pytest-trlcompat again"
    )
