"""The report as pages: Markdown for a pull request, one self-contained HTML file for a browser. Imports ``jinja2``."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import jinja2

from pytest_trlcompat.catalog import known_issues, remedies
from pytest_trlcompat.catalog.verdict import Record, Verdict
from pytest_trlcompat.matrix.report.model import Report
from pytest_trlcompat.matrix.report.rows import MANY, axes, rows
from pytest_trlcompat.matrix.report.torch_comparison import compare
from pytest_trlcompat.matrix.results import is_wrong

__all__ = ["html", "markdown"]

MEANINGS = {
    Verdict.OK: "right result at the right cost",
    Verdict.BROKEN: "the known symptom was seen",
    Verdict.SILENT: "no error, wrong result",
    Verdict.WASTEFUL: "right result, wrong cost",
    Verdict.BLOCKED: "another known issue stops it first",
    Verdict.ERROR: "a failure that nobody has explained",
    Verdict.HANG: "did not end in time",
    Verdict.ABSENT: "no such trainer or strategy in this release",
    Verdict.UNTESTABLE: "the environment cannot be built, or the software accelerator cannot do what is asked of it",
}


def markdown(report: Report) -> str:
    """Tables that GitHub renders, the evidence folded up below them."""
    return _render("compat.md.j2", report)


def html(report: Report) -> str:
    """A grid of cells by questions; every verdict links its evidence. Nothing is loaded from anywhere."""
    return _render("compat.html.j2", report)


def _render(template: str, report: Report) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=template.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["evidence"] = _evidence
    environment.filters["in_row"] = _in_row
    environment.tests["wrong"] = is_wrong
    environment.filters["known"] = known_issues.load().get
    environment.filters["cured_in"] = remedies.cured_in
    return environment.get_template(template).render(
        report=report,
        meanings=MEANINGS,
        many=len(report.cells) >= MANY,
        axes=axes(report),
        rows=rows,
        torch=compare(report.cells, report.columns),
    )


def _evidence(record: Record) -> str:
    """One fact a line, its value as JSON; texts as they are, because a traceback in quotes cannot be read."""
    return "\n".join(f"{name}: {_fact(value)}" for name, value in record.evidence.items())


def _fact(value: object) -> str:
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return value if "\n" not in value else "\n" + textwrap.indent(value.strip("\n"), "  ")


def _in_row(text: str) -> str:
    """Text that cannot break a Markdown table or list."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
