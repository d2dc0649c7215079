"""The report in a terminal, one table for each known issue. Imports ``rich``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pytest_trlcompat.matrix.report import CellReport, Report
from pytest_trlcompat.matrix.report_rows import MANY, rows
from pytest_trlcompat.matrix.sweep import is_wrong
from pytest_trlcompat.verdict import Record, Verdict

__all__ = ["show"]

_STYLES = {
    Verdict.OK: "green",
    Verdict.BROKEN: "red",
    Verdict.SILENT: "magenta",
    Verdict.WASTEFUL: "yellow",
    Verdict.ERROR: "bold red",
    Verdict.HANG: "bold red",
    Verdict.ABSENT: "dim",
    Verdict.UNTESTABLE: "cyan",
}
_WRONG = "bold white on red"
_PIPE_WIDTH = 120
"""Columns where there is no terminal to ask, as in a CI log."""


def show(report: Report, files: Sequence[Path] = (), file: IO[str] | None = None) -> None:
    """Print the tables, then what is not as predicted, then where the evidence lies."""
    stream = file or sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
    console = Console(file=stream, width=width, highlight=False)
    for issue in report.issues:
        console.print(_table(report, issue))
    for cell, record in report.wrong:
        console.print(Text.assemble((" not as predicted ", _WRONG), f" {cell.id}: {_sentence(record)}"), soft_wrap=True)
    for cell in report.unfinished:
        console.print(
            Text.assemble((f" {cell.sidecar.state} ", _WRONG), f" {cell.id}: {cell.sidecar.reason}"), soft_wrap=True
        )
    if report.unmeasured:
        number = len(report.unmeasured)
        were = "boundary of the catalogue was" if number == 1 else "boundaries of the catalogue were"
        console.print(f"{number} {were} measured by no cell; the pages list them")
    console.print(Text(report.summary, style="bold red" if report.wrong or report.unfinished else "bold green"))
    if files:
        names = ", ".join(path.name for path in files)
        console.print(Text(f"evidence: {files[0].parent}{os.sep} ({names})", style="dim"), soft_wrap=True)


def _table(report: Report, issue: str) -> Table:
    columns = [column for column in report.columns if column.issue == issue]
    table = Table(title=issue, title_style="bold", title_justify="left")
    many = len(report.cells) >= MANY
    for name in ("trl", "transformers", "cells") if many else ("cell",):
        table.add_column(name, no_wrap=True, justify="right" if name == "cells" else "left")
    for column in columns:
        table.add_column(f"{column.subject}\n{column.strategy}", justify="center")
    for row in rows(report, issue):
        entries = (_entry(row.first, row.first.at(column)) for column in columns)
        table.add_row(*(row.labels if many else [row.first.id]), *entries)
    return table


def _entry(cell: CellReport, record: Record | None) -> Text:
    if record is None:
        state = cell.sidecar.state
        return Text("-" if state == "tested" else state, style="dim")
    if is_wrong(record):
        return Text(f" ✗ {record.verdict} ", style=_WRONG)
    return Text(str(record.verdict), style=_STYLES[record.verdict])


def _sentence(record: Record) -> str:
    predicted = f"predicted {record.expected}" if record.expected else "nothing predicted it"
    return f"{record.issue}, {record.subject}, {record.strategy}: {record.verdict}, {predicted}"
