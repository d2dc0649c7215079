"""Links between the Markdown files of the checkout, which people read where no site is built."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from markdown_it import MarkdownIt

from tests.docs.examples import ROOT

FILES = [*ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def links(text: str) -> Iterator[str]:
    """The targets of links to other files, without headings in them."""
    for token in MarkdownIt().enable("table").parse(text):
        for child in token.children or ():
            target = urlsplit(str(child.attrGet("href") or ""))
            if child.type == "link_open" and not target.scheme and target.path:
                yield target.path


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in FILES])
def test_links_lead_to_files(page: Path) -> None:
    targets = set(links(page.read_text(encoding="utf-8")))
    assert {target for target in targets if not (page.parent / target).exists()} == set()


def test_links_are_seen_in_paragraphs_and_tables_and_not_in_code() -> None:
    text = "[a](a.md#x) [b](https://b.c) `[c](c.md)`\n\n| h |\n| --- |\n| [d](d.md) |\n"
    assert list(links(text)) == ["a.md", "d.md"]
