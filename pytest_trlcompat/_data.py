"""Find the suites and the fixtures: inside the installed package, or next to it in a checkout."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder", "fixtures", "suites"]

_PACKAGE = Path(__file__).resolve().parent


def fixtures() -> Path:
    """The folder of ``matrix.toml``, the locks and the configurations."""
    return _find("fixtures", "matrix.toml")


def suites() -> Path:
    """The folder of the suites: test modules by topic, with a test for each known issue."""
    return _find("suites", "conftest.py")


def cache_folder() -> Path:
    """``$TRLCOMPAT_CACHE``, else ``$XDG_CACHE_HOME/pytest-trlcompat``, else ``~/.cache/pytest-trlcompat``.

    Raises:
        RuntimeError: neither variable is set, and the user has no home directory.
    """
    configured = os.environ.get("TRLCOMPAT_CACHE")
    if configured:
        return Path(configured).expanduser().resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve() / "pytest-trlcompat"


def _find(name: str, landmark: str) -> Path:
    for parent in (_PACKAGE, _PACKAGE.parent):
        folder = parent / name
        if (folder / landmark).is_file():
            return folder
    raise FileNotFoundError(
        f"pytest-trlcompat's folder '{name}' is neither in {_PACKAGE} nor next to it: the installation is "
        "incomplete, install pytest-trlcompat again"
    )
