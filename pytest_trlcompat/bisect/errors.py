"""The one exception of this room: a text for the person who asked, without a traceback."""

from __future__ import annotations

from pytest_trlcompat.matrix.errors import MatrixError

__all__ = ["BisectError"]


class BisectError(MatrixError):
    """The question cannot be answered; the text says what was asked, what was found, what to do."""
