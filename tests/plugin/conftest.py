"""The doctor's small catalogue, of which the header of a run tells as well."""

from __future__ import annotations

from ..doctor.conftest import small

__all__ = ["small"]
