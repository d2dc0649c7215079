"""The one exception of this room: a text for the person who asked, without a traceback."""

from __future__ import annotations

__all__ = ["DiskFull", "MatrixError", "Unreachable", "Untestable"]


class MatrixError(Exception):
    """The matrix, a lock or a results file is not usable; the text says what was asked, what was found, what to do."""


class Untestable(MatrixError):
    """A cell cannot be resolved, or its environment cannot be built; the text is the resolver's reason."""


class Unreachable(Untestable):
    """The registry cannot be reached and the cache does not do, so nothing is known of the cell itself."""


class DiskFull(MatrixError):
    """There was no space left: no cell's fault, and the next one may need less."""
