"""How far a sweep is: rate and time left, by what its cells took before."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping

__all__ = ["Progress"]

_TOLD = 0.05
"""The part of a sweep that must be done before the rest is estimated."""


class Progress:
    """The cells of a sweep that have ended, and what is left of it.

    Args:
        cells: the ids of all cells that have to run.
        costs: seconds of cells, as far as they are known.
        now: the time of the beginning, in seconds.
    """

    def __init__(self, cells: Collection[str], costs: Mapping[str, float], now: float) -> None:
        known = [costs[cell] for cell in cells if cell in costs]
        middle = statistics.median(known) if known else 1.0
        self._costs = {cell: costs.get(cell, middle) for cell in cells}
        self._all = len(self._costs)
        self._began = now
        self._spent = 0.0

    def ended(self, cell: str, now: float) -> str:
        """``[12/104] 3.1 cells a minute, about 20 min left``."""
        self._spent += self._costs.pop(cell, 0.0)
        # A cell may end within the resolution of the clock.
        count, seconds = self._all - len(self._costs), max(now - self._began, 1e-9)
        text = f"[{count}/{self._all}] {60 * count / seconds:.1f} cells a minute"
        if not self._costs:
            return text
        left = sum(self._costs.values()) * seconds / self._spent if self._spent else 0.0
        return f"{text}, about {_duration(left)} left"

    def so_far(self, shares: Mapping[str, float], now: float) -> str:
        """``[2/9] trl1.16.0-tf5.23.0 61 %, about 4 min left``.

        Args:
            shares: of the cells that run, how much of each is done, from 0 to 1.
        """
        running = [f"{cell} {share:.0%}" for cell, share in shares.items()]
        text = f"[{self._all - len(self._costs)}/{self._all}] {', '.join(running)}"
        partly = sum(self._costs.get(cell, 0.0) * share for cell, share in shares.items())
        spent, seconds = self._spent + partly, max(now - self._began, 1e-9)
        left_of_costs = sum(self._costs.values()) - partly
        # Of less, which is mostly imports of the stack, nothing follows.
        if spent < _TOLD * (spent + left_of_costs):
            return text
        left = left_of_costs * seconds / spent
        return f"{text}, about {_duration(left)} left"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
