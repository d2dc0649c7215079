"""This package's one exception: a text for the user, without a traceback."""

from __future__ import annotations

from pytest_trlcompat.matrix.errors import MatrixError

__all__ = ["BisectError"]


class BisectError(MatrixError):
    """The search is not possible; the text says what was requested, what was found, what to do."""
