"""Links between the Markdown files of the checkout, which people read where no site is built.

Those of the site's pages, some of which are made when it is built: ``test_made_pages``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from markdown_it import MarkdownIt

from tests.docs.examples import ROOT

FILES = [*ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
MADE = [line for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines() if line.startswith("/docs/")]
"""What the build of the site makes: there may be a copy in this checkout, and there is none where others read."""


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
    below_root = {f"/{os.path.relpath(page.parent / target, ROOT)}" for target in targets}
    assert {path for path in below_root if path.startswith(tuple(MADE))} == set()


def test_git_ignores_what_the_build_of_the_site_makes() -> None:
    assert len(MADE) == 7


def test_links_are_seen_in_paragraphs_and_tables_and_not_in_code() -> None:
    text = "[a](a.md#x) [b](https://b.c) `[c](c.md)`\n\n| h |\n| --- |\n| [d](d.md) |\n"
    assert list(links(text)) == ["a.md", "d.md"]
