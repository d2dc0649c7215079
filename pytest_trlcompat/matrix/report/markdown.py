"""The Markdown of our own pages as plain text for a terminal, and as HTML for a browser.

Reads the part of Markdown that :mod:`pytest_trlcompat.matrix.report.issue_page` writes: headings, paragraphs, lists,
tables, and within a line code, strong text, links and escapes. Imports only the standard library, since a plain
installation has no library for Markdown.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Heading", "Items", "Paragraph", "Span", "Table", "as_html", "as_text", "parse"]

_ENTITIES = {"&amp;": "&", "&lt;": "<"}
_INLINE = re.compile(
    # Code comes first, since nothing within it is markup; a run of backticks ends at one of the same length.
    r"(?P<marks>`+)(?P<code>.+?)(?<!`)(?P=marks)(?!`)"
    r"|\*\*(?P<strong>(?:\\.|[^*\\])+)\*\*"
    r"|\[(?P<label>(?:\\.|[^\]\\])*)\]\((?P<target>[^()\s]*)\)"
    r"|<(?P<address>https?://[^<>\s]+)>"
    # ASCII punctuation alone: before anything else Markdown reads a backslash as itself.
    r"|\\(?P<escaped>[!-/:-@\[-`{-~])"
    r"|(?P<entity>&amp;|&lt;)",
)
_CELL = re.compile(r"(?:\\.|[^|\\])+")
_PART = r"[^\s-]+-?|-"
"""What is left of a name where it is divided at its hyphens."""
_NARROWEST = 8
"""Columns of a terminal that the column of a table has at least, or its longest word where that is shorter."""


@dataclass(frozen=True)
class Span:
    """A part of a line.

    Attributes:
        style: ``code``, ``strong``, ``link``, or empty.
        target: of a link.
    """

    text: str
    style: str = ""
    target: str = ""


Line = tuple[Span, ...]


@dataclass(frozen=True)
class Heading:
    """``## Who is affected``."""

    level: int
    line: Line


@dataclass(frozen=True)
class Paragraph:
    """Lines of text; a reader may wrap them anew."""

    line: Line


@dataclass(frozen=True)
class Items:
    """A list. An item's lines are kept apart, since the second one is a command to copy."""

    items: tuple[tuple[Line, ...], ...]


@dataclass(frozen=True)
class Table:
    """A table, all of whose rows have as many cells as the head."""

    head: tuple[Line, ...]
    rows: tuple[tuple[Line, ...], ...]


Block = Heading | Paragraph | Items | Table


# ---- reading


def parse(lines: Iterable[str]) -> Iterator[Block]:
    """The blocks of a page."""
    shown = "\n".join(line for line in lines if not line.startswith("<!--"))
    for part in re.split(r"\n{2,}", shown.strip("\n")):
        part_lines = part.splitlines()
        if not part_lines:
            continue
        first = part_lines[0]
        if first.startswith("#"):
            level = len(first) - len(first.lstrip("#"))
            yield Heading(level, _inline(first[level:].strip()))
        elif first.startswith("- "):
            yield _items(part_lines)
        elif first.startswith("|"):
            head, _, *rows = (_cells(line) for line in part_lines)
            yield Table(head, tuple(rows))
        else:
            yield Paragraph(_inline(" ".join(part_lines)))


def _items(lines: Sequence[str]) -> Items:
    items: list[list[Line]] = []
    for line in lines:
        if line.startswith("- "):
            items.append([])
        items[-1].append(_inline(line[2:]))
    return Items(tuple(map(tuple, items)))


def _cells(line: str) -> tuple[Line, ...]:
    return tuple(_inline(cell.strip()) for cell in _CELL.findall(line.strip().removeprefix("|").removesuffix("|")))


def _inline(text: str) -> Line:
    spans, end = [], 0
    for match in _INLINE.finditer(text):
        spans.append(Span(text[end : match.start()]))
        spans.append(_span(match))
        end = match.end()
    spans.append(Span(text[end:]))
    return tuple(span for span in spans if span.text)


def _span(match: re.Match[str]) -> Span:
    if (code := match["code"]) is not None:
        # A space on either side keeps backticks of the text apart from those of the markup.
        return Span(code[1:-1] if code.startswith(" ") and code.endswith(" ") and code.strip() else code, "code")
    if (strong := match["strong"]) is not None:
        return Span(_plain(_inline(strong)), "strong")
    if (label := match["label"]) is not None:
        return Span(_plain(_inline(label)), "link", match["target"])
    if (address := match["address"]) is not None:
        return Span(address, "link", address)
    return Span(match["escaped"] or _ENTITIES[match["entity"]])


def _plain(line: Line) -> str:
    return "".join(span.text for span in line)


# ---- as text


def as_text(blocks: Iterable[Block], width: int) -> Iterator[str]:
    """Lines of at most ``width`` columns, but for a word or a command that is longer."""
    first = True
    for block in blocks:
        if not first:
            yield ""
        first = False
        if isinstance(block, Heading):
            title = _plain(block.line)
            yield title
            yield ("=" if block.level == 1 else "-") * len(title)
        elif isinstance(block, Paragraph):
            yield from _wrapped(_quoted(block.line), width)
        elif isinstance(block, Items):
            for item in block.items:
                yield from _item(item, width)
        else:
            yield from _table(block, width)


def _wrapped(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]


def _item(lines: Sequence[Line], width: int) -> Iterator[str]:
    indent = "- "
    for line in lines:
        *before, last = line
        # A command is for copying: in one piece, on a line of its own.
        is_command = last.style == "code" and " " in last.text and (not before or before[-1].text.endswith(": "))
        if before or not is_command:
            yield from _wrapped(_quoted(tuple(before) if is_command else line), width, indent, "  ")
        if is_command:
            yield f"    {last.text}"
        indent = "  "


def _quoted(line: Line) -> str:
    """Code that has spaces in it would run into the words around it."""
    return "".join(f'"{span.text}"' if span.style == "code" and " " in span.text else span.text for span in line)


def _table(table: Table, width: int) -> Iterator[str]:
    head = [_plain(cell) for cell in table.head]
    rows = [[_standing_out(cell) for cell in row] for row in table.rows]
    room = width - 2 * (len(head) - 1)
    widths = _widths([head, *rows], room, r"\S+") or _widths([head, *rows], room, _PART)
    if not widths:
        yield from _records(head, rows, width)
        return
    yield from _row(head, widths)
    yield "  ".join("-" * width for width in widths)
    for row in rows:
        yield from _row(row, widths)


def _standing_out(line: Line) -> str:
    """What is bold elsewhere is in capitals where there is one font alone."""
    return "".join(span.text.upper() if span.style == "strong" else span.text for span in line)


def _widths(rows: Sequence[Sequence[str]], width: int, word: str) -> list[int]:
    """The columns' widths, the widest narrowed until all fit; empty where they cannot.

    Args:
        word: a pattern of what is not divided among lines.
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    longest = [max(len(part) for text in column for part in re.findall(word, text) or [""]) for column in columns]
    least = [max(part, min(_NARROWEST, natural)) for part, natural in zip(longest, widths, strict=True)]
    if sum(least) > width:
        return []
    # Comes to an end, since the least widths fit.
    while sum(widths) > width:
        narrowable = [number for number in range(len(widths)) if widths[number] > least[number]]
        widths[max(narrowable, key=widths.__getitem__)] -= 1
    return widths


def _row(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    columns = [_cell_lines(cell, width) for cell, width in zip(cells, widths, strict=True)]
    for number in range(max(map(len, columns))):
        texts = (column[number] if number < len(column) else "" for column in columns)
        yield "  ".join(f"{text:<{width}}" for text, width in zip(texts, widths, strict=True)).rstrip()


def _cell_lines(text: str, width: int) -> list[str]:
    """Names are divided at hyphens only where the column is narrower than one of them."""
    if max(map(len, text.split()), default=0) <= width:
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
    lines = [""]
    for part in re.findall(_PART + r"|\s+", text):
        if len(lines[-1] + part.rstrip()) <= width:
            lines[-1] += part
        else:
            lines.append(part.lstrip())
    return [line.rstrip() for line in lines]


def _records(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """A table that is too wide: a paragraph for each row, columns that agree together, without what is empty."""
    for number, row in enumerate(rows):
        if number:
            yield ""
        names: dict[str, list[str]] = {}
        for name, text in zip(head, row, strict=True):
            if text not in ("", "-"):
                names.setdefault(text, []).append(name)
        shown = "; ".join(f"{', '.join(columns)}: {text}" for text, columns in names.items())
        yield from _wrapped(shown, width, "- ", "  ")


# ---- as HTML

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
code { background: #8882; border-radius: 3px; padding: 0 .2em }
table { border-collapse: collapse; display: block; overflow-x: auto }
td, th { border: 1px solid #8886; padding: .2rem .5rem; text-align: left; vertical-align: top }
:root { color-scheme: light dark }
"""
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def as_html(blocks: Iterable[Block], title: str) -> str:
    """A page that stands alone: it loads nothing and runs nothing."""
    return _PAGE.format(title=html.escape(title), style=_STYLE, body="\n".join(map(_block, blocks)))


def _block(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{_line(block.line)}</h{block.level}>"
    if isinstance(block, Paragraph):
        return f"<p>{_line(block.line)}</p>"
    if isinstance(block, Items):
        items = ("<br>".join(map(_line, item)) for item in block.items)
        return "<ul>\n" + "\n".join(f"<li>{item}</li>" for item in items) + "\n</ul>"
    head = "".join(f"<th>{_line(cell)}</th>" for cell in block.head)
    rows = ("".join(f"<td>{_line(cell)}</td>" for cell in row) for row in block.rows)
    return f"<table>\n<tr>{head}</tr>\n" + "\n".join(f"<tr>{row}</tr>" for row in rows) + "\n</table>"


def _line(line: Line) -> str:
    return "".join(map(_element, line))


def _element(span: Span) -> str:
    text = html.escape(span.text)
    if span.style in ("code", "strong"):
        return f"<{span.style}>{text}</{span.style}>"
    # Links to other pages of the site lead nowhere from a page that stands alone.
    if span.style == "link" and span.target.startswith(("https://", "http://")):
        return f'<a href="{html.escape(span.target)}">{text}</a>'
    return text
