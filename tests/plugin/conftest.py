"""The doctor's small catalogue, which the header of a run uses too."""

from __future__ import annotations

from ..doctor.conftest import small

__all__ = ["small"]
