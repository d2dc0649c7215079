"""The value of the fixture ``version_matrix``: the installed versions, and the cells of the version matrix.

Must not import the stack; the cells are read when they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pytest_trlcompat import stack

if TYPE_CHECKING:
    from pytest_trlcompat.matrix.cells import Cell

__all__ = ["VersionMatrix"]


@dataclass(frozen=True)
class VersionMatrix:
    """The installed versions, and the cells to compare them with.

    Attributes:
        installed: package of the stack to version; a package that is not installed is left out.
    """

    installed: Mapping[str, str]

    def holds(self, **ranges: str) -> bool:
        """Whether every range holds for the installed version: ``holds(trl=">=0.15", transformers="<4.50")``.

        A package that is not installed satisfies no range.

        Raises:
            pytest_trlcompat.stack.RangeError: for an unknown package or a malformed range.
        """
        return stack.satisfied(ranges, self.installed)

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """All cells of ``fixtures/matrix.toml`` and ``fixtures/pairwise.toml``."""
        from pytest_trlcompat import _data
        from pytest_trlcompat.matrix.parsing import read_matrix

        return read_matrix(_data.fixtures() / "matrix.toml").cells

    @property
    def cell(self) -> Cell | None:
        """The cell whose pins are the installed versions, the one with the most pins if there are several."""
        matching = [cell for cell in self.cells if self._is(cell.pins)]
        return max(matching, key=lambda cell: len(cell.pins), default=None)

    def _is(self, pins: Mapping[str, str]) -> bool:
        return self.holds(**{package: f"=={version}" for package, version in stack.versions_of(pins).items()})
