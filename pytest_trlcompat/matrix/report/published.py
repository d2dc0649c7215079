"""What was published, as a report: the cells of the evidence, judged by the catalogue as it is now.

Needs no ``jinja2`` and no ``rich``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.evidence import Evidence, MeasuredCell
from pytest_trlcompat.catalog.verdict import FITTING, Record
from pytest_trlcompat.matrix.report.model import CellReport, Report, merge
from pytest_trlcompat.matrix.results import TESTED, Sidecar
from pytest_trlcompat.stack import PACKAGES

__all__ = ["report_of"]

_AS_PINNED = tuple(dict.fromkeys(("trl", "transformers", *PACKAGES)))
"""The packages of the stack, in the order in which people pin them."""


def report_of(evidence: Evidence, issue_id: str = "") -> Report:
    """The cells of the evidence: versions of the stack, verdicts and what blocked, no more is kept of them.

    Args:
        issue_id: of each cell the verdicts of this known issue alone, which takes a small part of the time.
    """
    cells = []
    for cell in evidence.cells:
        pins = {package: cell.versions[package] for package in _AS_PINNED if package in cell.versions}
        sidecar = Sidecar(cell.id, pins, TESTED, "", lock=dict(cell.versions), date=cell.date)
        records = tuple(record for record in _records(cell) if not issue_id or record.issue == issue_id)
        days = {cell.origin_of(record.key, evidence.date) for record in records}
        cells.append(CellReport(sidecar, records, measured_on={origin.provenance: origin.day for origin in days}))
    # merge() puts them into the order of a report.
    return merge(Report(()), cells).judged_by(known_issues.load())


def _records(cell: MeasuredCell) -> Iterator[Record]:
    for key, verdict in cell.verdicts.items():
        evidence: dict[str, Any] = dict(FITTING.get(verdict, {})) if key in cell.fitting else {}
        if by := cell.blocked_by.get(key):
            evidence["blocked_by"] = by
        elif not cell.attributed:
            evidence["attributed"] = False
        yield Record(*key, verdict, None, evidence, provenance=cell.origin_of(key).provenance)
