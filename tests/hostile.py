"""What somebody might say who wants to break a page, for tests by examples that hypothesis chooses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html.parser import HTMLParser

from hypothesis import strategies as st
from markdown_it import MarkdownIt

__all__ = ["EVIL", "PIECES", "Parsed", "lines", "rendered", "texts"]

EVIL = (
    "````\n</pre></script></style>--><img src=x onerror=alert(1)>\n"
    "| a [x](javascript:alert(1)) \x00\x1b[2J \ud800\u202e"
)

PIECES = (
    *("<img src=x onerror=alert(1)>", "</script>", "<script>alert(2)</script>", "</pre>", "-->", "<!--", "<![CDATA["),
    *("]]>", "<?php", "</details>", "<a href=x>", "&lt;", "&#60;", "&amp", "&", "<", ">", '"', "'"),
    *("`", "``", "```", "````\n", "~~~", "~~~~\n", "~", "~~x~~", "|", "\\", "\\\\|", "\\`", "*", "**b**", "_", "__b__"),
    *("a_b", "[x](javascript:alert(1))", "![x](y)", "[x]: y", "[^1]", "<https://a.b>", "https://a.b", "www.a.b"),
    *("# h", "> q", "- l", "+ l", "1. l", "1) l", "---", "===", "***", "\n\n", "\n", "\r\n", "\t", "    code", "% c"),
    *("(t)=", ":::{note}", "{role}`x`", "$x$", "$$", "+++", ": d", "{% raw %}", "{{ 7 * 7 }}", "{#", "#}"),
    *("\x00", "\x1b[31m", "\x1b]8;;http://a\x07", "\x9b2J", "\r", "\x08", "\x7f", "\x85", "\u2028", "\u2029"),
    *("\u202e", "\u2066", "\ud800", "\udfff", "\ufffe", "\uffff", "\ufffd", "\U0001f600", "\U0001fffe", "e\u0301"),
    *("[red]", "[/red]", "[/]", "[link=http://a]x[/link]", "\\[", " ", "  ", "word", "0", "1", "é"),
)
"""Pieces of markup of each form that a report has, and characters that some of them cannot hold."""

_CHARACTERS = st.characters(codec=None)  # lone surrogates included


def texts(max_pieces: int = 8) -> st.SearchStrategy[str]:
    """Any text, mostly of :data:`PIECES`."""
    piece = st.one_of(st.sampled_from(PIECES), st.sampled_from(PIECES), st.text(_CHARACTERS, max_size=6))
    return st.lists(piece, max_size=max_pieces).map("".join)


def lines() -> st.SearchStrategy[str]:
    """Texts that are not blank."""
    return texts().filter(str.strip)


def rendered(markdown: str) -> str:
    """As the site renders it, by the same parser, with the extensions that GitHub has as well."""
    return str(MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(markdown))


class Parsed(HTMLParser):
    """A page as a browser would take it: how often there is each tag with which attributes, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[tuple[str, tuple[tuple[str, str | None], ...]]] = Counter()
        self.others: list[str] = []
        self.scripts: list[str] = []
        self.text = ""
        self._script = False
        self.feed(html)
        self.close()

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.tags}

    def without(self, *attributes: str) -> Counter[tuple[str, tuple[str, ...]]]:
        """The tags with the names of their attributes, those left out whose names are given."""
        found: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for (name, pairs), number in self.tags.items():
            found[name, tuple(key for key, _ in pairs if key not in attributes)] += number
        return found

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags[tag, tuple(attrs)] += 1
        self._script = tag in ("script", "style")
        if self._script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._script = False

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts[-1] += data
        else:
            self.text += data

    def handle_comment(self, data: str) -> None:
        self.others.append(data)

    def handle_decl(self, decl: str) -> None:
        self.others.append(decl)

    def handle_pi(self, data: str) -> None:
        self.others.append(data)

    def unknown_decl(self, data: str) -> None:
        self.others.append(data)
