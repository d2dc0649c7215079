"""Make texts of libraries, package indexes and authors of commits harmless for the place where they are shown.

For a terminal and XML: :func:`printable`; for a terminal where a reader must see what is hidden: :func:`visible` and
:func:`encodable`. For Markdown: :func:`in_row`, :func:`in_block`, :func:`code`, :func:`fenced`. For HTML in Markdown:
:func:`in_html`; templates of HTML escape by themselves. For the data of a script: :func:`script_json`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

__all__ = [
    "code",
    "encodable",
    "fenced",
    "in_block",
    "in_html",
    "in_row",
    "one_line",
    "printable",
    "script_json",
    "visible",
]

_UNPRINTABLE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and line feed; escape sequences begin with one
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # change the direction of text: CVE-2021-42574
    "\u2028\u2029"  # end a line for some readers and not for others
    "\ud800-\udfff\ufffe\uffff"  # neither UTF-8 nor XML 1.0 has them
    "]"
)
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode's categories of characters that are not visible, or end a line."""
_MARKUP = re.compile(r"[\\`*\[\]|~$]|_+|[&<]|://|\bwww\.", re.IGNORECASE)
_ENTITIES = {"&": "&amp;", "<": "&lt;"}
_BLOCK = re.compile(r"[#>+\-=%:(]|\d{1,9}(?=[.)])")
"""How a line begins that is a heading, a quotation, a list, a rule, or one of MyST's comments, fences and targets."""


def printable(text: str) -> str:
    """The text with U+FFFD for characters that a terminal would obey, or that XML 1.0 and UTF-8 cannot represent."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def visible(text: str) -> str:
    """The text with every control, format or unassigned character and lone surrogate as Python writes it: ``\\x1b``."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        _as_python_writes(character) if unicodedata.category(character) in _HIDDEN else character for character in text
    )


def _as_python_writes(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def encodable(text: str, encoding: str | None) -> str:
    """The text with characters that an encoding lacks as Python writes them."""
    known = encoding or "utf-8"
    return text.encode(known, "backslashreplace").decode(known, "replace")


def one_line(text: str) -> str:
    """:func:`printable`, in one line."""
    return " ".join(printable(text).split())


def in_row(text: object) -> str:
    """For a paragraph or the cell of a table in Markdown: one line that holds no markup, no link and no column."""
    line = one_line(str(text))
    return _MARKUP.sub(_escaped, line)


def _escaped(match: re.Match[str]) -> str:
    markup, line = match[0], match.string
    if markup in _ENTITIES:
        return _ENTITIES[markup]
    # Within a word it does not emphasise, and names are full of it.
    if markup[0] == "_":
        within = match.start() and line[match.start() - 1].isalnum() and line[match.end() : match.end() + 1].isalnum()
        return markup if within else "\\_" * len(markup)
    # "://" and "www." turn the text around them into a link.
    if len(markup) > 1:
        return markup.replace(":", "\\:").replace(".", "\\.")
    return f"\\{markup}"


def in_block(text: object) -> str:
    """:func:`in_row`, for text with which a paragraph or an entry of a list begins in Markdown."""
    line = in_row(text)
    start = _BLOCK.match(line)
    if start is None:
        return line
    digits = start[0] if start[0].isdigit() else ""
    return f"{digits}\\{line[len(digits) :]}"


def code(text: object) -> str:
    """For Markdown: text as it stands, within a line."""
    line = one_line(str(text))
    if not line:
        return ""
    marks = _longer_than_any("`", line, 1)
    space = " " if "`" in line else ""
    return f"{marks}{space}{line}{space}{marks}"


def fenced(text: str, language: str = "text", least: int = 3) -> str:
    """For Markdown: a block of text as it stands, between fences of backticks that it cannot close."""
    shown = printable(text)
    fence = _longer_than_any("`", shown, least)
    return f"{fence}{language}\n{shown}\n{fence}"


def _longer_than_any(mark: str, text: str, least: int) -> str:
    return mark * max(least, 1 + max(map(len, re.findall(f"{mark}+", text)), default=0))


def in_html(text: object) -> str:
    """For an element or an attribute of HTML in Markdown: one line without markup."""
    import html  # the names of all characters, which few processes need

    return html.escape(one_line(str(text)))


def script_json(document: Mapping[str, Any]) -> str:
    """For a ``script`` element: JSON in ASCII without a character of markup."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    # A parser of HTML ends the element at ``</script``, also within a string of the script.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
