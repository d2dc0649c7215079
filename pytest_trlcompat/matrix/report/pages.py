"""The report as Markdown, for a pull request."""

from __future__ import annotations

import functools
from pathlib import Path

import jinja2

from pytest_trlcompat._escaping import fenced, in_block, in_html, in_row, printable
from pytest_trlcompat.catalog import known_issues, remedies
from pytest_trlcompat.catalog.summary_parts import expected, measured, sentence
from pytest_trlcompat.catalog.verdict import is_wrong
from pytest_trlcompat.matrix.report import texts
from pytest_trlcompat.matrix.report.changes import Changes
from pytest_trlcompat.matrix.report.model import Report
from pytest_trlcompat.matrix.report.rows import MANY, axes, rows
from pytest_trlcompat.matrix.report.torch_comparison import compare

__all__ = ["environment", "markdown"]


_TEMPLATES = Path(__file__).parent / "templates"


# Kept, since it keeps the compiled templates.
@functools.cache
def environment(*, html: bool, templates: Path = _TEMPLATES) -> jinja2.Environment:
    """Where the templates are found and what they may call."""
    jinja_environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        autoescape=html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    jinja_environment.filters.update(
        evidence=texts.evidence, fenced=fenced, in_block=in_block, in_html=in_html, in_row=in_row
    )
    jinja_environment.filters.update(expected=expected, measured=measured, sentence=sentence)
    jinja_environment.filters["known"] = lambda issue: known_issues.load().get(issue)
    jinja_environment.filters["cured_in"] = remedies.cured_in
    jinja_environment.tests["wrong"] = is_wrong
    return jinja_environment


def markdown(report: Report, changes: Changes | None = None) -> str:
    """Tables that GitHub renders, the evidence folded up below them."""
    page = environment(html=False).get_template("compat.md.j2")
    return printable(
        page.render(
            report=report,
            changes=changes or Changes(),
            meanings=texts.MEANINGS,
            many=len(report.cells) >= MANY,
            axes=axes(report),
            rows=rows,
            torch=compare(report.cells, report.columns),
        )
    )
