"""How well measurements support an answer: by cells with the stack's versions, on both sides of them, or elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Confidence", "Level"]


class Level(str, Enum):
    """How well measurements support an answer, from best to worst."""

    MEASURED = "measured"
    """A cell with these versions and this minor release of torch was measured."""
    OTHER_TORCH = "other torch"
    """Such a cell was measured, with another minor release of torch, for which the catalogue predicts the same."""
    BETWEEN = "between"
    """Two cells, one with older and one with newer versions, gave the same verdict."""
    BEYOND = "beyond"
    """Only cells on one side of the stack's versions gave this verdict, or cells to which it does not apply."""
    UNMEASURED = "unmeasured"
    """No cell of the published sweep gave this verdict; only the catalogue predicts it."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Confidence:
    """How well measurements support a verdict, and which cells do.

    Attributes:
        strategy: under which the cells were measured, if not under the requested one.
        torch: with which they were measured, if not with the stack's.
        cause_predicted: whether they are known to have failed, but not why: the published sweep did not attribute their
            failures to known issues, so that the cause of a ``blocked`` verdict is predicted alone.
    """

    level: Level
    cells: tuple[str, ...] = ()
    strategy: str = ""
    torch: str = ""
    cause_predicted: bool = False

    def describe(self) -> str:
        if self.cause_predicted:
            return f"{self._failures()}; the cause is predicted"
        under = f" under {self.strategy}" if self.strategy else ""
        torch = f", with torch {self.torch}" if self.torch else ""
        match self.level:
            case Level.MEASURED:
                return f"measured on {self.cells[0]}{under}"
            case Level.OTHER_TORCH:
                return f"measured on {self.cells[0]}{under}{torch}"
            case Level.BETWEEN:
                return f"between {self.cells[0]} and {self.cells[1]}, which both gave this verdict{under}{torch}"
            case Level.BEYOND:
                nearest = f"the nearest cell with this verdict{under} is {self.cells[0]}"
                return f"outside the measured range; {nearest}{torch}"
            case _:
                return "not measured in the published sweep; predicted by the catalogue"

    def _failures(self) -> str:
        under = f" under {self.strategy}" if self.strategy else ""
        match self.level:
            case Level.BEYOND:
                return f"outside the measured range; the nearest cell that failed{under} is {self.cells[0]}"
            case Level.BETWEEN:
                return f"failed on {self.cells[0]} and {self.cells[1]}{under}, between which this stack is"
            case _:
                torch = f", with torch {self.torch}" if self.torch else ""
                return f"failed on {self.cells[0]}{under}{torch}"
