"""Where the suites and the fixtures lie: inside the installed package, or beside it in a checkout.

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
        f"pytest-trlcompat's folder '{name}' was looked for in {_PACKAGE} and beside it and was not found; "
        "the installation is incomplete: install pytest-trlcompat again"
    )
