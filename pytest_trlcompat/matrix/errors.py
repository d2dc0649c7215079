"""The exceptions of the matrix; their texts are shown to users without a traceback."""

from __future__ import annotations

__all__ = ["DiskFull", "MatrixError", "Unreachable", "Untestable"]


class MatrixError(Exception):
    """The matrix, a lock or a results file is not usable; the text says what is wrong and what to do."""


class Untestable(MatrixError):
    """A cell cannot be resolved, or its environment cannot be built; the text is the resolver's reason."""


class Unreachable(Untestable):
    """The package index cannot be reached and the cache is not sufficient; this says nothing about the cell itself."""


class DiskFull(MatrixError):
    """The disk is full; this is not the fault of the cell, and the next one may need less."""
