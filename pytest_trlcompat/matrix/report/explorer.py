"""The report as a page that one explores: known issues by cells, one self-contained HTML file.

Verdicts and texts lie in the page as JSON, the evidence of each cell compressed, to be unpacked when somebody asks for
it: so the page is small, works from a file, and loads nothing from anywhere. The table is HTML already and can be read
without JavaScript; the script only changes what it shows.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from pytest_trlcompat._escaping import printable, script_json
from pytest_trlcompat.catalog import known_issues, remedies
from pytest_trlcompat.catalog.evidence import MeasuredCell
from pytest_trlcompat.catalog.issue import SUBJECTS, TRAINERS
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.summary_parts import expected
from pytest_trlcompat.catalog.verdict import SEVERITY, Record, Verdict, is_wrong
from pytest_trlcompat.matrix.report import texts
from pytest_trlcompat.matrix.report.changes import Changes
from pytest_trlcompat.matrix.report.model import CellReport, Column, Report, evidence_of
from pytest_trlcompat.matrix.report.pages import environment
from pytest_trlcompat.matrix.report.torch_comparison import TorchComparison, compare
from pytest_trlcompat.stack import versions_of

__all__ = ["html"]

_TEMPLATES = Path(__file__).parent / "templates"

_LETTERS = {
    Verdict.SILENT: "S",
    Verdict.BROKEN: "B",
    Verdict.ERROR: "E",
    Verdict.HANG: "H",
    Verdict.WASTEFUL: "W",
    Verdict.BLOCKED: "K",
    Verdict.UNTESTABLE: "?",
    Verdict.OK: "\N{CHECK MARK}",
    Verdict.ABSENT: "-",
}
"""What tells verdicts apart without colour."""

_WORST_FIRST = (*SEVERITY, Verdict.UNTESTABLE, Verdict.OK, Verdict.ABSENT)
"""Which verdict stands for an issue in a cell where strategies differ."""

_NONE = "."


def html(
    report: Report, changes: Changes | None = None, *, evidence: bool = True, title: str = "Compatibility report"
) -> str:
    """The page.

    Args:
        changes: since the last published sweep, and since when each verdict stands.
        evidence: whether the cells have any; a published sweep has verdicts alone, and a page for each known issue.
    """
    changes = changes or Changes()
    report = dataclasses.replace(report, cells=report.cells[::-1])  # the newest is what most people look for
    known = known_issues.load()
    issues = _in_order(report.issues, known)
    script, style = ((_TEMPLATES / f"compat.{kind}").read_text(encoding="utf-8") for kind in ("js", "css"))
    torch = compare(report.cells, report.columns)
    blobs = [_packed(cell, report.columns) for cell in report.cells] if evidence else []
    page = environment(html=True).get_template("compat.html.j2")
    rendered = page.render(
        title=title,
        report=report,
        changes=changes,
        trainers=[
            (name, list(group)) for name, group in itertools.groupby(issues, lambda issue: _trainer(issue, known))
        ],
        verdicts=[(verdict, _LETTERS[verdict], texts.MEANINGS[verdict]) for verdict in _WORST_FIRST],
        letters=_LETTERS,
        worst=_worst,
        label=lambda cell: " ".join([report.short(cell), *re.findall(r"-(py[\d.]+)$", cell.id)]),
        torch=torch,
        script=Markup(script),
        style=Markup(style),
        # By its hash the page's own script runs, and none that a text of a cell smuggles in.
        policy=f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; base-uri 'none'",
        data=Markup(script_json(_data(report, issues, known, torch, changes, published=not evidence))),
        blobs=blobs,
    )
    return printable(rendered)


def _data(
    report: Report,
    issues: Sequence[str],
    known: Catalog,
    torch: TorchComparison,
    changes: Changes,
    *,
    published: bool,
) -> dict[str, Any]:
    columns = [column for column in report.columns if column.subject in SUBJECTS]
    measured = evidence_of(report).cells
    since: dict[str, int] = {}
    return {
        "published": published,
        "verdicts": [
            {"name": verdict.value, "letter": _LETTERS[verdict], "problem": verdict.is_problem}
            for verdict in _WORST_FIRST
        ],
        "issues": [
            {
                "id": name,
                "trainer": _trainer(name, known),
                "torch": [change.describe() for change in torch.of(name)],
                **_about(known, name, measured),
            }
            for name in issues
        ],
        "columns": [[issues.index(c.issue), SUBJECTS.index(c.subject), c.strategy] for c in columns],
        "cells": [{**_cell(report, cell, columns), **_history(cell, columns, changes, since)} for cell in report.cells],
        "since": list(since),  # after the cells, which add to it
    }


def _about(known: Catalog, name: str, measured: Sequence[MeasuredCell]) -> dict[str, Any]:
    if name not in known:
        return {"title": "", "wrong": "", "remedy": "", "cured_in": "", "upstream": []}
    issue = known[name]
    return {
        "title": issue.title,
        "wrong": issue.wrong,
        "remedy": remedies.remedy(issue, ways=remedies.ways_of(issue, measured)),
        "cured_in": remedies.cured_in(issue),
        "upstream": list(issue.upstream),
    }


def _cell(report: Report, cell: CellReport, columns: Sequence[Column]) -> dict[str, Any]:
    records = [cell.at(column) for column in columns]
    wrong = {n: expected(record) for n, record in enumerate(records) if record and is_wrong(record)}
    return {
        "id": cell.id,
        "name": report.name(cell),
        "versions": versions_of(cell.versions),
        "date": cell.sidecar.date or "",
        "state": cell.sidecar.state,
        "reason": cell.sidecar.reason or "",
        "seconds": round(cell.sidecar.seconds),
        "verdicts": "".join(_LETTERS[record.verdict] if record else _NONE for record in records),
        **({"wrong": wrong} if wrong else {}),
    }


def _history(
    cell: CellReport, columns: Sequence[Column], changes: Changes, since: dict[str, int]
) -> dict[str, list[Any]]:
    """Since when its verdicts stand, as runs of columns for which the same text holds, and which of them changed.

    Args:
        since: the texts of all cells, to each its number; new ones are added.
    """
    standing = changes.standing.get(cell.id)
    if standing is None:
        return {}
    keys = [(column.issue, column.subject, column.strategy) for column in columns]
    runs: list[list[int]] = []
    for key in keys:
        text_number = since.setdefault(standing[key].describe(), len(since)) if key in standing else None
        if runs and text_number in (None, runs[-1][0]):  # where there is no verdict, nothing is said
            runs[-1][1] += 1
        else:
            runs.append([text_number or 0, 1])
    others = {change.key for change in changes.changed if change.cell == cell.id}
    changed = [number for number, key in enumerate(keys) if key in others]
    return {"since": runs, **({"changed": changed} if changed else {})}


def _packed(cell: CellReport, columns: Sequence[Column]) -> str:
    """The evidence of a cell, by the number of its column, and the versions of all its packages."""
    records = {number: record for number, column in enumerate(columns) if (record := cell.at(column))}
    document = {
        "packages": dict(cell.sidecar.lock),
        "evidence": {number: _facts(record) for number, record in records.items()},
    }
    # Without a time, so that the page is the same whenever it is made.
    return base64.b64encode(gzip.compress(json.dumps(document).encode(), mtime=0)).decode()


def _facts(record: Record) -> dict[str, Any]:
    return {
        "text": printable(texts.evidence(record)),
        "seconds": round(record.seconds, 1),
        "expected": expected(record),
    }


def _worst(cell: CellReport, issue: str, subject: str = SUBJECTS[0]) -> tuple[Verdict | None, bool]:
    """The verdict that stands for an issue in a cell, and whether one of its verdicts is not as predicted."""
    records = [record for record in cell.of_issue(issue) if record.subject == subject]
    verdict = min((record.verdict for record in records), key=_WORST_FIRST.index, default=None)
    return verdict, any(map(is_wrong, records))


def _in_order(issues: Iterable[str], known: Catalog) -> list[str]:
    """By trainer, those that meet every trainer last."""
    return sorted(issues, key=lambda issue: ([*TRAINERS, ""].index(_trainer(issue, known)), issue))


def _trainer(issue: str, known: Catalog) -> str:
    return known[issue].trainer if issue in known else ""


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
