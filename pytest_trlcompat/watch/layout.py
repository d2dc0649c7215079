"""Where the watch keeps its files: ``build/watch``, apart from the results of sweeps."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from pytest_trlcompat.matrix.layout import Layout

__all__ = ["WatchLayout"]


@dataclass(frozen=True)
class WatchLayout(Layout):
    """A checkout, with the results of the watch in a folder of their own.

    Attributes:
        folder: with the results. Environments are shared with the matrix.
        scope: what is run of each cell, as the name of a folder within it.
    """

    folder: Path
    scope: str = "compat"

    @property
    def results(self) -> Path:
        """Verdicts of all days: a cell is measured once."""
        return self.folder / self.scope

    @property
    def bisections(self) -> Path:
        return self.folder / "bisect"

    @property
    def catalog(self) -> Path:
        return self.root / "pytest_trlcompat" / "catalog" / "issues"

    def day(self, day: datetime.date) -> Path:
        """The folder of a day's page."""
        return self.folder / day.isoformat()
