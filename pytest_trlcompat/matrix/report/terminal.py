"""The report in a terminal: one screen, or a table for each known issue."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pytest_trlcompat._escaping import one_line
from pytest_trlcompat.catalog.summary import screen
from pytest_trlcompat.catalog.summary_parts import STYLES, CellSummary, sentence
from pytest_trlcompat.catalog.verdict import Record, Verdict, is_wrong
from pytest_trlcompat.matrix.report.changes import Changes
from pytest_trlcompat.matrix.report.model import CellReport, Column, Report
from pytest_trlcompat.matrix.report.rows import MANY, axes, rows
from pytest_trlcompat.matrix.report.torch_comparison import TorchComparison

__all__ = ["show", "show_tables"]

_WRONG = "bold white on red"
_UNTESTED = "bold black on cyan"
_SCREEN = 80
"""Columns of the summary, which must be read at a glance."""
_PIPE_WIDTH = 120
"""Columns of tables where there is no terminal to ask, as in a CI log."""
_CHANGES = 5
"""Verdicts that changed since the last published sweep which the summary names."""
_FRAME = 3
"""Characters of a table's column in addition to its text."""


def show(report: Report, page: Path | None = None, file: IO[str] | None = None, changes: Changes | None = None) -> None:
    """Print the summary, one screen.

    Args:
        page: where every verdict stands.
        changes: since the last published sweep; those in the cells of the report come before the summary.
    """
    cells = [
        CellSummary(report.name(cell), cell.sidecar.pins.get("trl", "-"), cell.verdicts, _unfinished(cell))
        for cell in report.cells
    ]
    console = Console(file=file or sys.stdout, width=_SCREEN, highlight=False)
    if changes is not None and (concerned := changes.of(cell.id for cell in report.cells)).worth_saying:
        console.print(
            _text(f"{concerned.summary}{':' if concerned.changed else ''}".capitalize(), "bold"), soft_wrap=True
        )
        for change in concerned.changed[:_CHANGES]:
            console.print(_text(f"- {change.describe()}"), soft_wrap=True)
        if len(concerned.changed) > _CHANGES:
            console.print(_text(f"and {len(concerned.changed) - _CHANGES} more, all in compat.html"), soft_wrap=True)
        console.print()
    for line in screen(cells, where=_near(page), more="tables of all issues: nox -s report -- --tables"):
        text = Text.assemble(*((part.text, part.style) for part in line))
        console.print(text, soft_wrap=True)


def _unfinished(cell: CellReport) -> str:
    state = cell.sidecar.state
    return "" if state == "tested" else f"{state}, {cell.sidecar.reason or 'no reason was kept'}"


def _near(page: Path | None) -> str:
    """The path as short as it can be written here."""
    if page is None:
        return ""
    with_dots = os.path.relpath(page)
    return str(page) if with_dots.startswith("..") else with_dots


def show_tables(
    report: Report, files: Sequence[Path] = (), file: IO[str] | None = None, torch: TorchComparison | None = None
) -> None:
    """Print the tables, then what is not as predicted, what torch alone changes, and where the evidence lies."""
    stream = file or sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
    console = Console(file=stream, width=width, highlight=False)
    for issue in report.issues:
        columns = [column for column in report.columns if column.issue == issue]
        for part in _parts(columns, console.width - _labels_width(report)):
            console.print(_table(report, part))
    for cell, record in report.wrong:
        console.print(_marked(" not as predicted ", _WRONG, f"{cell.id}: {sentence(record)}"), soft_wrap=True)
    for cell in report.unfinished:
        text = f"{cell.id}: {cell.sidecar.reason}"
        console.print(_marked(f" {cell.sidecar.state} ", _WRONG, text), soft_wrap=True)
    for reason, alike in report.untested:
        (cell, record), number = alike[0], len(alike)
        where = f"{cell.id}: {record.issue}, {record.subject}, {record.strategy}" + (
            f", and {number - 1} more" * (number > 1)
        )
        console.print(_marked(" not tested ", _UNTESTED, f"{where}: {reason}"), soft_wrap=True)
    if torch is not None and torch.compared:
        for change in torch.changes:
            console.print(_text(f"{change.column.issue}, {change.describe()}"), soft_wrap=True)
        console.print(_text(torch.summary), soft_wrap=True)
    if report.unmeasured:
        number = len(report.unmeasured)
        were = "boundary of the catalogue was" if number == 1 else "boundaries of the catalogue were"
        console.print(f"{number} {were} measured by no cell; the pages list them")
    failed = report.wrong or report.unfinished or not report.has_measured
    ending = "red" if failed else "yellow" if report.untested else "green"
    console.print(_text(report.summary, f"bold {ending}"), soft_wrap=True)
    if files:
        names = ", ".join(path.name for path in files)
        console.print(_text(f"evidence: {files[0].parent}{os.sep} ({names})", "dim"), soft_wrap=True)


def _marked(mark: str, style: str, text: str) -> Text:
    return Text.assemble((_text(mark, style)), " ", _text(text))


def _text(text: str, style: str = "") -> Text:
    """As it stands, in one line: ``rich`` would read words in brackets as its own markup."""
    return Text(one_line(text) if text.strip() == text else f" {one_line(text)} ", style=style)


def _parts(columns: Sequence[Column], width: int) -> list[list[Column]]:
    """The columns of one issue, in as many tables as the width of the terminal demands, cut between subjects first."""
    if sum(map(_width, columns)) <= width:
        return [list(columns)]
    parts: list[list[Column]] = []
    for _, group in itertools.groupby(columns, lambda column: column.subject):
        part: list[Column] = []
        for column in group:
            if part and sum(map(_width, part)) + _width(column) > width:
                parts.append(part)
                part = []
            part.append(column)
        parts.append(part)
    return parts


def _width(column: Column) -> int:
    return max(map(len, (column.subject, column.strategy, *Verdict))) + _FRAME


def _labels_width(report: Report) -> int:
    if len(report.cells) < MANY:
        return max(map(len, map(report.name, report.cells)), default=0) + _FRAME + 1
    return sum(len("0.10.1 to 0.10.1") + _FRAME for _ in axes(report)) + len("cells") + _FRAME + 1


def _table(report: Report, columns: Sequence[Column]) -> Table:
    table = Table(title=_text(columns[0].issue), title_style="bold", title_justify="left")
    many = len(report.cells) >= MANY
    for name in (*axes(report), "cells") if many else ("cell",):
        table.add_column(name, no_wrap=True, justify="right" if name == "cells" else "left")
    for column in columns:
        header = Text("\n").join((_text(column.subject), _text(column.strategy)))
        table.add_column(header, justify="center")
    for row in rows(report, columns):
        entries = (_entry(row.first, row.first.at(column)) for column in columns)
        table.add_row(*map(_text, row.labels if many else [report.name(row.first)]), *entries)
    return table


def _entry(cell: CellReport, record: Record | None) -> Text:
    if record is None:
        state = cell.sidecar.state
        return _text("-" if state == "tested" else state, "dim")
    if is_wrong(record):
        return Text(f" ✗ {record.verdict} ", style=_WRONG)
    return Text(str(record.verdict), style=STYLES[record.verdict])
