"""Text of strangers, safe to print: no terminal obeys it, and every encoding has it.

A version, a marker, a URL or a file's name may hold an escape sequence that rewrites what a terminal shows, or marks
that change the direction in which it is read. They are shown as ``\\x1b``, as Python writes them.
"""

from __future__ import annotations

import unicodedata

__all__ = ["encodable", "printable"]

_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode's categories of what has no shape of its own, or ends a line."""


def printable(text: str) -> str:
    """The text, with every control, format or unassigned character and lone surrogate as an escape."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(character) if _is_hidden(character) else character for character in text)


def encodable(text: str, encoding: str | None) -> str:
    """The text, with what an encoding lacks as an escape."""
    known = encoding or "utf-8"
    return text.encode(known, "backslashreplace").decode(known, "replace")


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in _HIDDEN


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
