"""The end of a run on one screen, as plain lines with styles, for a sweep and for a pytest run.

Other modules write them to a terminal, because the plugin must not need ``rich``.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from pytest_trlcompat._escaping import printable
from pytest_trlcompat.catalog.summary_cells import details
from pytest_trlcompat.catalog.summary_parts import (
    ALARM,
    FAINT,
    GOOD,
    HEADING,
    PROBLEMS,
    STYLES,
    CellSummary,
    Line,
    Part,
    corrected,
    counted,
    length,
    sentence,
)
from pytest_trlcompat.catalog.verdict import Verdict

__all__ = ["conclusion", "screen"]

_WRONG = 10
"""Verdicts that are not as predicted, each of one line or two, that are named."""
_LINES = 2
"""For one of them."""
_REASONS = 3
"""Reasons that are given of cells that were not finished, and of verdicts that could not be tested."""
_SHORTEST_TABLE = 2
_BREAK = re.compile(r"[\t\n]")


def screen(cells: Sequence[CellSummary], *, where: str, more: str = "", width: int = 80, rows: int = 40) -> list[Line]:
    """The summary, no wider than ``width``, but for the path ``where``, and no longer than ``rows``.

    What is not as predicted comes first, then each cell, then the conclusion, which is what a person reads last. The
    cells are shown in as much detail as fits.

    Args:
        where: where every verdict stands.
        more: how to see more in the terminal.
    """
    head = [*_head(cells), *_wrong(cells, where, width), *_unfinished(cells, where), ()]
    last = [*_pointers(where, more, width), *conclusion(cells, width)]
    # Lines that a reason may have: it is shortened before cells are left out.
    for lines in (4, 1):
        tail = [(), *_untested(cells, width, lines)]
        left = rows - len(head) - len(tail) - len(last)
        if left >= _SHORTEST_TABLE:
            break
    for body in details(cells, width):
        if len(body) <= left:
            break
    # A path that was cut would be of no use.
    return [*(_cut(line, width) for line in (*head, *body[: max(left, 0)], *tail)), *last]


def conclusion(cells: Sequence[CellSummary], width: int = 80) -> list[Line]:
    """The last lines: that upstream is broken although its tests passed, and whether the corrected trainers are ok."""
    lines: list[Line] = []
    records = [record for cell in cells for record in cell.records if record.subject == "upstream"]
    shown = {verdict: {r.issue for r in records if r.verdict is verdict} for verdict in PROBLEMS}
    affected = {verdict: issues for verdict, issues in shown.items() if verdict.is_own_problem}
    affecting = set().union(*affected.values())
    if affecting:
        affect = "known issue affects" if len(affecting) == 1 else "known issues affect"
        harmed = any(issues for verdict, issues in affected.items() if verdict is not Verdict.WASTEFUL)
        broken = "Upstream is broken: " if harmed else ""
        lines.append((Part(f"{broken}{len(affecting)} {affect} TRL's own trainers", ALARM),))
        lines.append(counted((verdict, len(issues)) for verdict, issues in affected.items()))
    if unexplained := len(shown[Verdict.ERROR]):
        suites = "1 suite failed" if unexplained == 1 else f"{unexplained} suites failed"
        lines.append((Part(f"{suites} with TRL's own trainers, which no known issue explains", ALARM),))
    if blocked := len(shown[Verdict.BLOCKED] - affecting):
        could = "1 known issue" if blocked == 1 else f"{blocked} known issues"
        lines.append((Part(f"{could} could not be judged: blocked by others", STYLES[Verdict.BLOCKED]),))
    if any(shown.values()):
        lines.append((Part("A test passes where its verdict is the predicted one, also where that is broken."),))
    elif any(record.verdict is Verdict.OK for record in records):
        left = sum(record.untested for record in records) or sum(bool(cell.unfinished) for cell in cells)
        some = "no problem was found in what was tested" if left else "no problem was found"
        lines.append((Part(f"TRL's own trainers: {some}", "" if left else GOOD),))
    text, bad = corrected(cells)
    if text:
        wrapped = textwrap.wrap(f"Corrected trainers: {text}", width, subsequent_indent="  ")
        lines += [(Part(line, ALARM if bad else GOOD),) for line in wrapped]
    return lines


def _head(cells: Sequence[CellSummary]) -> Iterator[Line]:
    verdicts, wrong = sum(len(cell.records) for cell in cells), sum(len(cell.wrong) for cell in cells)
    untested = sum(record.untested for cell in cells for record in cell.records)
    unfinished = sum(bool(cell.unfinished) for cell in cells)
    parts = [Part(f"{_many(len(cells), 'cell')}, {_many(verdicts, 'verdict')}: ", HEADING)]
    if wrong:
        parts.append(Part(f"{wrong} not as predicted", ALARM))
    elif verdicts and untested == verdicts:
        parts.append(Part("none could be measured", ALARM))
    elif verdicts:
        parts.append(Part("all as predicted", GOOD))
    elif not unfinished:
        parts.append(Part("nothing was measured", ALARM))
    if untested:
        parts.append(Part(f", {untested} untestable", STYLES[Verdict.UNTESTABLE]))
    if unfinished:
        comma = ", " if len(parts) > 1 else ""
        parts.append(Part(f"{comma}{_many(unfinished, 'cell')} not finished", ALARM))
    yield tuple(parts)


def _wrong(cells: Sequence[CellSummary], where: str, width: int) -> Iterator[Line]:
    every = [(cell, record) for cell in cells for record in cell.wrong]
    shown = every if len(every) <= _WRONG else every[: _WRONG - 1]
    for cell, record in shown:
        text = f"{cell.name}: {sentence(record)}" if len(cells) > 1 else sentence(record)
        for line in textwrap.wrap(
            text, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False, max_lines=_LINES
        ):
            yield (Part(line, ALARM),)
    if left := len(every) - len(shown):
        yield Part(f"  and {left} more", ALARM), Part(f", all in {where}" if where else "")


def _unfinished(cells: Sequence[CellSummary], where: str) -> Iterator[Line]:
    every = [cell for cell in cells if cell.unfinished]
    for cell in every[:_REASONS]:
        yield Part("  not finished  ", ALARM), Part(f"{cell.name}: {' '.join(cell.unfinished.split())}")
    if (left := len(every) - _REASONS) > 0:
        yield Part(f"  and {left} more", ALARM), Part(f", all in {where}" if where else "")


def _untested(cells: Sequence[CellSummary], width: int, lines: int) -> Iterator[Line]:
    """How many verdicts the software accelerator could not give, by reason, the most frequent first."""
    records = [record for cell in cells for record in cell.records if record.untested]
    reasons = Counter(" ".join(record.reason.split()) or "no reason was kept" for record in records)
    style = STYLES[Verdict.UNTESTABLE]
    for reason, number in reasons.most_common(_REASONS):
        label = f"{number} untestable"
        text = f"{label}: {reason}"
        first, *others = textwrap.wrap(text, width, subsequent_indent="  ", max_lines=lines, break_on_hyphens=False)
        yield Part(label, style), Part(first[len(label) :])
        yield from ((Part(line),) for line in others)
    left = sum(number for _, number in reasons.most_common()[_REASONS:])
    if left:
        yield Part(f"{left} untestable", style), Part(" for other reasons")


def _pointers(where: str, more: str, width: int) -> list[Line]:
    texts = [f"Every verdict and its evidence: {where}"] * bool(where) + [more] * bool(more)
    joined = "; ".join(texts)
    return [(Part(printable(text), FAINT),) for text in ([joined] if len(joined) <= width else texts) if text]


def _cut(line: Line, width: int) -> Line:
    """The line within ``width`` columns, without what a terminal cannot hold."""
    cut: list[Part] = []
    for part in line:
        left = width - length(cut)
        text = _BREAK.sub(" ", printable(part.text))
        if len(text) > left:
            return (*cut, Part(text[: max(left - 3, 0)] + "..."[: max(left, 0)], part.style))
        cut.append(Part(text, part.style))
    return tuple(cut)


def _many(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
