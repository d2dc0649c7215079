"""The report where a hosted run shows it: a short page for its summary, and annotations of lines of this repository.

The page is Markdown, ``$GITHUB_STEP_SUMMARY`` or a file of artifacts; annotations are GitHub's workflow commands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from pytest_trlcompat._escaping import in_block, in_row, one_line, printable
from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.summary_parts import expected, measured
from pytest_trlcompat.catalog.verdict import Record
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.report.changes import Changes
from pytest_trlcompat.matrix.report.model import CellReport, Report

__all__ = ["append", "summary_page", "workflow_commands"]

_ROWS = 50
"""Verdicts, cells or changes that the page names; a summary may have 1 MiB, and nobody reads so much."""
_ANNOTATIONS = 10
"""GitHub shows so many errors of a step, and as many warnings, and drops the others without a word."""
_NAMED = 20
"""Verdicts that one annotation names."""
_REASON = 300
"""Characters of a reason that is repeated."""


def summary_page(report: Report, changes: Changes) -> str:
    """What is not as predicted, what was not finished, what changed; each at most 50 lines, and how many are left."""
    return printable("\n".join(_page(report, changes))) + "\n"


def append(page: str, path: Path) -> None:
    """Add it to a file, which may hold what other commands of the same step have said.

    Raises:
        MatrixError: it cannot be written.
    """
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(page)
    except OSError as error:
        raise MatrixError(f"--summary {path}: {error.strerror}; name a file, as $GITHUB_STEP_SUMMARY does") from error


def _page(report: Report, changes: Changes) -> Iterator[str]:
    yield f"## {in_block(report.summary)}"
    yield ""
    if report.wrong:
        yield "### Not as predicted"
        yield ""
        yield "| cell | known issue | trainers | strategy | verdict | predicted |"
        yield "| --- | --- | --- | --- | --- | --- |"
        for cell, record in report.wrong[:_ROWS]:
            row = (cell.id, *record.key, measured(record), expected(record) or "nothing")
            yield f"| {' | '.join(map(in_row, row))} |"
        yield from _left(len(report.wrong))
    if report.unfinished:
        yield "### Not finished"
        yield ""
        for cell in report.unfinished[:_ROWS]:
            yield f"- **{in_row(cell.id)}** is {in_row(cell.sidecar.state)}: {in_row(_reason(cell))}"
        yield from _left(len(report.unfinished))
    if changes.last:
        yield f"### {in_block(changes.summary.capitalize())}"
        yield ""
        yield from (f"- {in_block(change.describe())}" for change in changes.changed[:_ROWS])
        yield from _left(len(changes.changed))
    if report.counts:
        yield "| verdict | number |"
        yield "| --- | --: |"
        yield from (f"| {verdict} | {number:,} |" for verdict, number in report.counts.items())
        yield ""


def _left(number: int) -> Iterator[str]:
    yield ""
    if number > _ROWS:
        yield f"And {number - _ROWS} more, all in `compat.html` of the artifacts."
        yield ""


def _reason(cell: CellReport) -> str:
    text = one_line(cell.sidecar.reason or "no reason was kept")
    return text if len(text) <= _REASON else f"{text[:_REASON]}..."


def workflow_commands(report: Report) -> list[str]:
    """A line for each known issue with verdicts that are not as predicted, at its entry of the catalogue, which is to
    be corrected where the code is not; and for each cell that was not finished. What GitHub would drop is counted.
    """
    wrong: dict[str, list[str]] = {}
    for cell, record in report.wrong:
        wrong.setdefault(record.issue, []).append(f"{cell.id}: {_sentence(record)}")
    errors = [
        _command("error", _some(texts), {"title": f"{issue}: not as predicted", **_place(issue)})
        for issue, texts in wrong.items()
    ]
    warnings = [
        _command("warning", _reason(cell), {"title": f"{cell.id}: {cell.sidecar.state}"}) for cell in report.unfinished
    ]
    return [*_shown("error", errors, "known issues"), *_shown("warning", warnings, "cells")]


def _sentence(record: Record) -> str:
    return f"{record.subject}, {record.strategy}: {measured(record)}, predicted {expected(record) or 'nothing'}"


def _some(texts: list[str]) -> str:
    more = [f"and {len(texts) - _NAMED} more"] if len(texts) > _NAMED else []
    return "\n".join([*texts[:_NAMED], *more])


def _shown(kind: str, commands: list[str], things: str) -> list[str]:
    if len(commands) <= _ANNOTATIONS:
        return commands
    shown = commands[: _ANNOTATIONS - 1]
    return [*shown, _command(kind, f"{len(commands) - len(shown)} more {things}; the summary and the report name them")]


def _place(issue: str) -> dict[str, str]:
    """Where the predictions of a known issue begin, from the root of the repository; lines from 1."""
    if issue not in known_issues.load():
        return {}
    lines = known_issues.file_of(issue).read_text(encoding="utf-8").splitlines()
    return {"file": known_issues.source_of(issue), "line": str(lines.index("prediction = [") + 1)}


def _command(kind: str, message: str, properties: Mapping[str, str] | None = None) -> str:
    """A workflow command: ``::error file=name,line=1,title=text::message``."""
    listed = ",".join(f"{name}={_property(text)}" for name, text in (properties or {}).items())
    return f"::{kind}{' ' * bool(listed)}{listed}::{_data(message)}"


def _data(text: str) -> str:
    """As GitHub's own toolkit escapes it. Line feeds alone end a line here; what a terminal would obey is taken out."""
    return printable(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
