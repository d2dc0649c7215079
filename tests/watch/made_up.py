"""Cells, verdicts and changes that are made up, in place of trainings."""

from __future__ import annotations

import datetime
from typing import Any

from pytest_trlcompat.catalog.verdict import Record, Verdict
from pytest_trlcompat.matrix.cells import Cell
from pytest_trlcompat.matrix.covering.releases import Release
from pytest_trlcompat.matrix.report.model import CellReport
from pytest_trlcompat.matrix.results import TESTED, Sidecar
from pytest_trlcompat.watch.plan import WatchedCell

__all__ = ["ALL", "TRANSFORMERS", "TRL", "cell_report", "record", "watched"]

DAY = datetime.date(2026, 6, 10)
TRL = Release("trl", "1.1.0", DAY)
TRANSFORMERS = Release("transformers", "5.1.0", DAY - datetime.timedelta(days=5))


def watched(release: Release | None, previous: str = "1.0.0", **pins: str) -> WatchedCell:
    stack = {"transformers": "5.0.0", "trl": "1.0.0", "peft": "0.1.0", **pins}
    if release is not None:
        stack[release.package] = release.version
    cell = Cell({"trl": stack["trl"], "transformers": stack["transformers"]}, DAY + datetime.timedelta(days=1))
    return WatchedCell(cell, stack, release, previous if release else "")


ALL = watched(None, trl="1.1.0", transformers="5.1.0")


def record(
    verdict: str,
    expected: str | None = "ok",
    issue: str = "grpo-token-normalizer",
    strategy: str = "ddp",
    subject: str = "upstream",
    **evidence: Any,
) -> Record:
    return Record(issue, subject, strategy, Verdict(verdict), Verdict(expected) if expected else None, evidence)


def cell_report(cell: WatchedCell, *records: Record) -> CellReport:
    sidecar = Sidecar(cell.cell.id, cell.cell.pins, TESTED, "s", dict(cell.stack), str(cell.cell.date), seconds=9.0)
    return CellReport(sidecar, records)
