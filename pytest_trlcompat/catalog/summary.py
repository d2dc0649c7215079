"""The end of a run on one screen, as plain lines with styles: that of a sweep and that of a pytest run.

What writes them to a terminal is elsewhere, since the plugin must not need ``rich``. Imports only the standard library.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pytest_trlcompat.catalog.verdict import Record, Verdict, is_wrong

__all__ = [
    "ALARM",
    "FAINT",
    "PROBLEMS",
    "STYLES",
    "CellSummary",
    "Line",
    "Part",
    "conclusion",
    "corrected",
    "expected",
    "least_to_most",
    "measured",
    "printable",
    "screen",
    "sentence",
]

STYLES = {
    Verdict.OK: "green",
    Verdict.BROKEN: "red",
    Verdict.SILENT: "magenta",
    Verdict.WASTEFUL: "yellow",
    Verdict.BLOCKED: "blue",
    Verdict.ERROR: "bold red",
    Verdict.HANG: "bold red",
    Verdict.ABSENT: "dim",
    Verdict.UNTESTABLE: "cyan",
}
"""Words for the look of each verdict, as ``rich`` reads them."""

ALARM = "bold red"
FAINT = "dim"
_GOOD = "bold green"
_HEADING = "bold"

PROBLEMS = (Verdict.SILENT, Verdict.BROKEN, Verdict.WASTEFUL, Verdict.ERROR, Verdict.HANG, Verdict.BLOCKED)
"""In which users want to read of problems: first those that no error announces."""

_WRONG = 10
"""Verdicts that are not as predicted, each of one line or two, that are named."""
_LINES = 2
"""For one of them."""
_REASONS = 3
"""Reasons that are given of cells that were not finished, and of verdicts that could not be tested."""
_SHORTEST_TABLE = 2
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True)
class Part:
    """A piece of a line; ``style`` holds words as in :data:`STYLES`."""

    text: str
    style: str = ""


Line = tuple[Part, ...]


@dataclass(frozen=True)
class CellSummary:
    """What the end of a run is made of.

    Attributes:
        release: of TRL; neighbours are joined by it where cells are too many.
        unfinished: why it has no verdicts or not all of them; empty for a cell that was tested.
    """

    name: str
    release: str
    records: Sequence[Record]
    unfinished: str = ""

    def issues(self, subject: str, verdict: Verdict) -> dict[str, list[Record]]:
        """The verdicts of one kind by known issue."""
        found: dict[str, list[Record]] = {}
        for record in self.records:
            if record.subject == subject and record.verdict is verdict:
                found.setdefault(record.issue, []).append(record)
        return found

    @property
    def wrong(self) -> list[Record]:
        return [record for record in self.records if is_wrong(record)]


def printable(text: str) -> str:
    """Without what a terminal, XML or UTF-8 cannot hold: control characters, escapes of colours, lone surrogates."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def sentence(record: Record) -> str:
    """``grpo-a, upstream, fsdp1: silent, predicted ok``."""
    predicted = f"predicted {expected(record)}" if record.expected else "nothing was predicted"
    return f"{record.issue}, {record.subject}, {record.strategy}: {measured(record)}, {predicted}"


def measured(record: Record) -> str:
    """The verdict, with the issue that blocked."""
    return f"blocked by {record.blocked_by}" if record.blocked_by else str(record.verdict)


def expected(record: Record) -> str:
    """What was predicted: a verdict, with the issue that was expected to block where another one did; may be empty."""
    blocker = record.evidence.get("blocked_by_expected") if record.expected is Verdict.BLOCKED else None
    return f"blocked by {blocker}" if blocker else str(record.expected or "")


def screen(cells: Sequence[CellSummary], *, where: str, more: str = "", width: int = 80, rows: int = 40) -> list[Line]:
    """The summary, no wider than ``width``, but for the path ``where``, and no longer than ``rows``.

    What is not as predicted comes first, then each cell, then the conclusion, which is what a person reads last. The
    cells are shown in as much detail as fits.

    Args:
        where: where every verdict stands.
        more: how to see more in the terminal.
    """
    head = [*_head(cells), *_wrong(cells, where, width), *_unfinished(cells, where), ()]
    last = [*_pointers(where, more, width), *conclusion(cells)]
    for lines in (4, 1):  # for a reason, which is shortened before the cells are left out
        tail = [(), *_untested(cells, width, lines)]
        left = rows - len(head) - len(tail) - len(last)
        if left >= _SHORTEST_TABLE:
            break
    for body in _details(cells, width):
        if len(body) <= left:
            break
    # A path that was cut would be of no use.
    return [*(_cut(line, width) for line in (*head, *body[: max(left, 0)], *tail)), *last]


def conclusion(cells: Sequence[CellSummary]) -> list[Line]:
    """The last words: that upstream is broken although its tests passed, and whether the corrected trainers are ok."""
    lines: list[Line] = []
    records = [record for cell in cells for record in cell.records if record.subject == "upstream"]
    found = {verdict: {r.issue for r in records if r.verdict is verdict} for verdict in PROBLEMS}
    own = {verdict: issues for verdict, issues in found.items() if verdict.is_own_problem}
    affecting = set().union(*own.values())
    if affecting:
        affect = "known issue affects" if len(affecting) == 1 else "known issues affect"
        harmed = any(issues for verdict, issues in own.items() if verdict is not Verdict.WASTEFUL)
        broken = "Upstream is broken: " if harmed else ""
        lines.append((Part(f"{broken}{len(affecting)} {affect} TRL's own trainers", ALARM),))
        lines.append(_counts((verdict, len(issues)) for verdict, issues in own.items()))
    if unexplained := len(found[Verdict.ERROR]):
        suites = "1 suite failed" if unexplained == 1 else f"{unexplained} suites failed"
        lines.append((Part(f"{suites} with TRL's own trainers, which no known issue explains", ALARM),))
    if blocked := len(found[Verdict.BLOCKED] - affecting):
        could = "1 known issue" if blocked == 1 else f"{blocked} known issues"
        lines.append((Part(f"{could} could not be judged: blocked by others", STYLES[Verdict.BLOCKED]),))
    if any(found.values()):
        lines.append((Part("A test passes where its verdict is the predicted one, also where that is broken."),))
    elif any(record.verdict is Verdict.OK for record in records):
        left = sum(record.untested for record in records) or sum(bool(cell.unfinished) for cell in cells)
        some = "no problem was found in what was tested" if left else "no problem was found"
        lines.append((Part(f"TRL's own trainers: {some}", "" if left else _GOOD),))
    text, bad = corrected(cells)
    if text:
        lines.append((Part(f"Corrected trainers: {text}", ALARM if bad else _GOOD),))
    return lines


def _head(cells: Sequence[CellSummary]) -> Iterator[Line]:
    verdicts, wrong = sum(len(cell.records) for cell in cells), sum(len(cell.wrong) for cell in cells)
    unfinished = sum(bool(cell.unfinished) for cell in cells)
    parts = [Part(f"{_many(len(cells), 'cell')}, {_many(verdicts, 'verdict')}: ", _HEADING)]
    if wrong:
        parts.append(Part(f"{wrong} not as predicted", ALARM))
    elif verdicts or not unfinished:
        parts.append(Part("all as predicted", _GOOD))
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
        counted = f"{number} untestable"
        text = f"{counted}: {reason}"
        first, *others = textwrap.wrap(text, width, subsequent_indent="  ", max_lines=lines, break_on_hyphens=False)
        yield Part(counted, style), Part(first[len(counted) :])
        yield from ((Part(line),) for line in others)
    left = sum(number for _, number in reasons.most_common()[_REASONS:])
    if left:
        yield Part(f"{left} untestable", style), Part(" for other reasons")


def _pointers(where: str, more: str, width: int) -> list[Line]:
    texts = [f"Every verdict and its evidence: {where}"] * bool(where) + [more] * bool(more)
    joined = "; ".join(texts)
    return [(Part(printable(text), FAINT),) for text in ([joined] if len(joined) <= width else texts) if text]


def _details(cells: Sequence[CellSummary], width: int) -> Iterator[list[Line]]:
    """The cells, in less and less detail."""
    with_verdicts = [cell for cell in cells if cell.records]
    for block in (_full, _named, _one_line_each, _two_lines, _worst_line):
        yield [line for cell in with_verdicts for line in (*_title(cell, width), *block(cell, width))]
    yield [line for cell in with_verdicts for line in _title(cell, width)]
    for number in range(len({cell.release for cell in cells}), 0, -1):
        yield _table(_groups(with_verdicts, number), width)


def _title(cell: CellSummary, width: int) -> list[Line]:
    """One line, or two where they do not fit into one."""
    counts = _counts((verdict, len(cell.issues("upstream", verdict))) for verdict in PROBLEMS)
    if not counts and any(r.subject == "upstream" and r.verdict is Verdict.OK for r in cell.records):
        counts = (Part("no problem", STYLES[Verdict.OK]),)
    name, (found, bad) = Part(cell.name, _HEADING), corrected([cell])
    ours = Part(f"corrected: {found}" if found else "", ALARM if bad else STYLES[Verdict.OK])
    gap = width - _length((name, *counts, ours)) - 2
    if gap >= 2 or not found:
        return [(name, Part("  "), *counts, *([Part(" " * gap), ours] if found else []))]
    return [(name, Part(" " * max(width - _length((name, ours)), 2)), ours), (Part("  "), *counts)]


def _counts(numbers: Iterable[tuple[Verdict, int]]) -> Line:
    """``3 silent, 1 broken``."""
    parts = [Part(f"{number} {verdict}", STYLES[verdict]) for verdict, number in numbers if number]
    return tuple(each for part in parts for each in (Part(", "), part))[1:]


def corrected(cells: Iterable[CellSummary]) -> tuple[str, bool]:
    """``61 ok`` or ``59 ok, 2 broken``, empty where nothing was measured; and whether some is a problem."""
    counts = Counter(record.verdict for cell in cells for record in cell.records if record.subject == "corrected")
    shown = [verdict for verdict in (Verdict.OK, *PROBLEMS, Verdict.UNTESTABLE) if counts[verdict]]
    return ", ".join(f"{counts[verdict]:,} {verdict}" for verdict in shown), any(v.is_problem for v in shown)


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
        yield _span([cell.release for cell in group]), _HEADING
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


def least_to_most(cells: Iterable[CellSummary], verdict: Verdict) -> str:
    """How many known issues have this verdict with TRL's own trainers, ``3`` in each cell or ``0-3``."""
    numbers = sorted({len(cell.issues("upstream", verdict)) for cell in cells})
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _span(releases: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys([releases[0], releases[-1]]))


def _length(line: Sequence[Part]) -> int:
    return sum(len(part.text) for part in line)


def _cut(line: Line, width: int) -> Line:
    """The line within ``width`` columns, without what a terminal cannot hold."""
    cut: list[Part] = []
    for part in line:
        left = width - _length(cut)
        text = printable(part.text)
        if len(text) > left:
            return (*cut, Part(text[: max(left - 3, 0)] + "..."[: max(left, 0)], part.style))
        cut.append(Part(text, part.style))
    return tuple(cut)


def _many(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
