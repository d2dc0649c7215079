"""One process, without an engine."""

from __future__ import annotations

from pytest_trlcompat.strategies.family import Family

__all__ = ["Single"]


class Single(Family):
    """One process: what every other strategy is compared with."""

    names = ("single",)
    position = 10
    accelerate_type = "NO"
