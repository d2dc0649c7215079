"""The one error of this package."""

from __future__ import annotations

__all__ = ["CiError"]


class CiError(Exception):
    """No file can be written for this project; the text says why, and what to do."""
