"""Rows for a table of many cells: neighbours whose verdicts are the same share one."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from packaging.version import Version

from pytest_trlcompat.catalog.verdict import is_wrong
from pytest_trlcompat.matrix.report.model import CellReport, Column, Report

__all__ = ["MANY", "Row", "axes", "has_other_pins", "release", "rows"]

MANY = 12
"""From so many cells on a table has shared rows; with fewer each cell has its own."""

_AXES = ("trl", "transformers")


@dataclass(frozen=True)
class Row:
    """Cells whose verdicts in a table are the same, oldest first.

    Attributes:
        axes: packages whose releases tell the cells of the report apart.
    """

    cells: tuple[CellReport, ...]
    axes: tuple[str, ...] = _AXES

    @property
    def first(self) -> CellReport:
        """The cell whose entries stand for all."""
        return self.cells[0]

    @property
    def labels(self) -> tuple[str, ...]:
        """The releases of each of the axes, from the oldest to the newest, and the number of cells.

        A cell that has other pins than these is named by its id.
        """
        if has_other_pins(self.first):
            return (self.first.id, *("" for _ in self.axes[1:]), "1")
        spans = (_span(release(cell, package) for cell in self.cells) for package in self.axes)
        return (*spans, str(len(self.cells)))


def release(cell: CellReport, package: str) -> str:
    """The version that a cell pins, or of torch has."""
    return cell.torch if package == "torch" else cell.sidecar.pins.get(package, "")


def axes(report: Report) -> tuple[str, ...]:
    """The packages whose releases tell the cells apart: TRL, Transformers, and torch where cells differ in it."""
    return (*_AXES, "torch") if len(report.torches) > 1 else _AXES


def rows(report: Report, columns: Sequence[Column]) -> list[Row]:
    """The rows of a table with these columns.

    Cells of one TRL release that follow each other and agree are one row; so are releases of TRL that follow each
    other and agree in all of their cells. What is wrong never shares a row with what is not, nor a cell that has
    other pins than TRL, Transformers and torch with any.
    """
    if len(report.cells) < MANY:
        return [Row((cell,), axes(report)) for cell in report.cells]
    releases = [
        [Row(tuple(run), axes(report)) for _, run in itertools.groupby(cells, lambda cell: _answers(cell, columns))]
        for _, cells in itertools.groupby(report.cells, lambda cell: release(cell, "trl"))
    ]
    return list(_joined(releases, columns))


def _joined(releases: Iterable[Sequence[Row]], columns: Sequence[Column]) -> Iterator[Row]:
    """Join releases that follow each other and are one row each, with the same answers."""

    def key(rows_of_release: Sequence[Row]) -> Hashable:
        # A release of several rows joins no other: its key equals nothing else.
        return _answers(rows_of_release[0].first, columns) if len(rows_of_release) == 1 else id(rows_of_release)

    for _, alike in itertools.groupby(releases, key):
        first, *others = alike
        if others:  # each of them is one row
            yield Row(tuple(cell for release_rows in (first, *others) for cell in release_rows[0].cells), first[0].axes)
        else:
            yield from first


def _answers(cell: CellReport, columns: Sequence[Column]) -> Hashable:
    """What a row shows of a cell."""
    if has_other_pins(cell):
        return cell.id
    records = (cell.at(column) for column in columns)
    verdicts = tuple(record and (record.verdict, record.expected, is_wrong(record)) for record in records)
    return (cell.sidecar.state, verdicts)


def has_other_pins(cell: CellReport) -> bool:
    """Whether a person pinned more than TRL, Transformers and torch."""
    return bool(set(cell.named) - {*_AXES, "torch"})


def _span(versions: Iterable[str]) -> str:
    known = sorted({version for version in versions if version}, key=Version)
    return " to ".join(dict.fromkeys([*known[:1], *known[-1:]]))
