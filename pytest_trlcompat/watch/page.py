"""The day's page as Markdown and HTML, and the texts to paste upstream."""

from __future__ import annotations

from pathlib import Path

from pytest_trlcompat import __version__
from pytest_trlcompat._escaping import fenced, in_row, printable
from pytest_trlcompat._secrets import redacted
from pytest_trlcompat.matrix.report import pages, texts
from pytest_trlcompat.stack import describe
from pytest_trlcompat.watch.outcome import Cause, Outcome

__all__ = ["html", "markdown", "to_paste"]

_TEMPLATES = Path(__file__).with_name("templates")


def markdown(outcome: Outcome) -> str:
    """Renders in GitHub's summary of a job."""
    return _rendered("watch.md.j2", outcome, html=False)


def html(outcome: Outcome) -> str:
    """One file, without scripts."""
    return _rendered("watch.html.j2", outcome, html=True)


def to_paste(cause: Cause) -> str:
    """Markdown for an upstream issue: the bisection's report, or what was measured; empty if it is not upstream's."""
    if cause.first.is_ours or cause.first.subject == "corrected":
        return ""
    if cause.narrowed is not None and cause.narrowed.report:
        return cause.narrowed.report
    change = cause.first
    lines = [
        f"# {in_row(change.cell.about)}: {in_row(change.issue)} is {change.record.verdict} under "
        f"{in_row(', '.join(change.strategies))}",
        "",
        f"Measured with {in_row(describe(change.cell.stack))}, Python on Linux, by pytest-trlcompat {__version__}. "
        "It is not known yet which release changed this.",
        "",
        fenced(redacted(texts.evidence(change.record))),
        "",
    ]
    return "\n".join(lines)


def _rendered(name: str, outcome: Outcome, *, html: bool) -> str:
    template = pages.environment(html=html, templates=_TEMPLATES).get_template(name)
    return redacted(printable(template.render(day=outcome, version=__version__)))
