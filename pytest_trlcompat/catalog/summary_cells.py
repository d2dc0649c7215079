"""The cells in a summary, in as much detail as fits, and many of them as a table."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from pytest_trlcompat.catalog.summary_parts import (
    ALARM,
    FAINT,
    HEADING,
    PROBLEMS,
    STYLES,
    CellSummary,
    Line,
    Part,
    corrected,
    counted,
    least_to_most,
    length,
)
from pytest_trlcompat.catalog.verdict import Record, Verdict

__all__ = ["details"]


def details(cells: Sequence[CellSummary], width: int) -> Iterator[list[Line]]:
    """The cells, in less and less detail."""
    with_verdicts = [cell for cell in cells if cell.records]
    for block in (_full, _named, _one_line_each, _two_lines, _worst_line):
        yield [line for cell in with_verdicts for line in (*_title(cell, width), *block(cell, width))]
    yield [line for cell in with_verdicts for line in _title(cell, width)]
    for number in range(len({cell.release for cell in cells}), 0, -1):
        yield _table(_groups(with_verdicts, number), width)


def _title(cell: CellSummary, width: int) -> list[Line]:
    """One line, or two where they do not fit into one."""
    counts = counted((verdict, len(cell.issues("upstream", verdict))) for verdict in PROBLEMS)
    if not counts and any(r.subject == "upstream" and r.verdict is Verdict.OK for r in cell.records):
        counts = (Part("no problem", STYLES[Verdict.OK]),)
    name, (text, bad) = Part(cell.name, HEADING), corrected([cell])
    ours = Part(f"corrected: {text}" if text else "", ALARM if bad else STYLES[Verdict.OK])
    gap = width - length((name, *counts, ours)) - 2
    if gap >= 2 or not text:
        return [(name, Part("  "), *counts, *([Part(" " * gap), ours] if text else []))]
    return [(name, Part(" " * max(width - length((name, ours)), 2)), ours), (Part("  "), *counts)]


_LABEL = 11
"""Columns before the names of issues: two of indentation, the longest verdict that is a problem, and a space."""


def _items(cell: CellSummary, verdict: Verdict, strategies: bool) -> list[str]:
    texts = []
    for issue, records in sorted(cell.issues("upstream", verdict).items()):
        blockers = sorted({record.blocked_by for record in records} - {""})
        under = f" ({' '.join(record.strategy for record in records)})" if strategies else ""
        texts.append(f"{issue}{under}" + (f" by {' '.join(blockers)}" if blockers else ""))
    return texts


def _kinds(cell: CellSummary, strategies: bool = False) -> Iterator[tuple[Verdict, list[str]]]:
    for verdict in PROBLEMS:
        if items := _items(cell, verdict, strategies):
            yield verdict, items


def _full(cell: CellSummary, width: int) -> Iterator[Line]:
    return _wrapped(_kinds(cell, strategies=True), width)


def _named(cell: CellSummary, width: int) -> Iterator[Line]:
    return _wrapped(_kinds(cell), width)


def _wrapped(kinds: Iterable[tuple[Verdict, list[str]]], width: int) -> Iterator[Line]:
    for verdict, items in kinds:
        # No line breaks between an issue and its strategies.
        text = ", ".join(item.replace(" ", "\0") for item in items)
        lines = textwrap.wrap(text, max(width - _LABEL, 20), break_long_words=False, break_on_hyphens=False)
        for label, line in itertools.zip_longest([str(verdict)], lines, fillvalue=""):
            yield Part(f"  {label:<{_LABEL - 2}}", STYLES[verdict]), Part(line.replace("\0", " "))


def _one_line_each(cell: CellSummary, width: int) -> Iterator[Line]:
    for verdict, items in _kinds(cell):
        text = _as_many(items, width - _LABEL)
        yield Part(f"  {verdict.value:<{_LABEL - 2}}", STYLES[verdict]), Part(text)


def _two_lines(cell: CellSummary, width: int) -> Iterator[Line]:
    return itertools.islice(_one_line_each(cell, width), 2)


def _worst_line(cell: CellSummary, width: int) -> Iterator[Line]:
    return itertools.islice(_one_line_each(cell, width), 1)


def _as_many(items: Sequence[str], width: int) -> str:
    """As many as fit, and how many do not."""
    for number in range(len(items), 0, -1):
        left = len(items) - number
        text = ", ".join(items[:number]) + (f" and {left} more" if left else "")
        if len(text) <= width:
            return text
    return f"{len(items)} issues"


def _groups(cells: Sequence[CellSummary], number: int) -> list[list[CellSummary]]:
    """Cells by their release of TRL, neighbours that differ least joined until there are ``number`` groups."""
    groups = [list(group) for _, group in itertools.groupby(cells, lambda cell: cell.release)]
    affected = [{(r.issue, r.verdict) for cell in group for r in cell.records if _affects(r)} for group in groups]
    while len(groups) > max(number, 1):
        nearest = min(range(len(groups) - 1), key=lambda at: len(affected[at] ^ affected[at + 1]))
        groups[nearest] += groups.pop(nearest + 1)
        affected[nearest] |= affected.pop(nearest + 1)
    return groups


def _affects(record: Record) -> bool:
    return record.subject == "upstream" and record.verdict.is_problem


def _table(groups: Sequence[Sequence[CellSummary]], width: int) -> list[Line]:
    """A line for each group: how many known issues of each kind affect its cells."""
    kinds = [
        verdict for verdict in PROBLEMS if any(cell.issues("upstream", verdict) for group in groups for cell in group)
    ]

    def row(group: Sequence[CellSummary]) -> Iterator[tuple[str, str]]:
        yield _span([cell.release for cell in group]), HEADING
        yield str(len(group)), ""
        for verdict in kinds:
            text = least_to_most(group, verdict)
            yield text, STYLES[verdict] if text != "0" else FAINT
        text, bad = corrected(group)
        yield text or "-", ALARM if bad else STYLES[Verdict.OK]

    heads = ["trl", "cells", *map(str, kinds), "corrected"]
    table = [[(head, FAINT) for head in heads], *(list(row(group)) for group in groups)]
    widths = [max(len(line[column][0]) for line in table) for column in range(len(heads))]
    last = len(heads) - 1
    return [
        tuple(
            Part(text if column == last else f"{text:<{size}}" if column == 0 else f"{text:>{size}}", style)
            if part == "text"
            else Part("  ")
            for column, ((text, style), size) in enumerate(zip(line, widths, strict=True))
            for part in (("gap", "text") if column else ("text",))
        )
        for line in table
    ]


def _span(releases: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys([releases[0], releases[-1]]))
