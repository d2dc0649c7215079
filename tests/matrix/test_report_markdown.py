"""The Markdown of our own pages, as text and as HTML: held against a library for Markdown."""

from __future__ import annotations

import random
import re

import pytest
from markdown_it import MarkdownIt

from pytest_trlcompat._escaping import code, in_row
from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.matrix.report.issue_command import page_of
from pytest_trlcompat.matrix.report.markdown import Heading, Items, Paragraph, Span, Table, as_html, as_text, parse

PAGES = random.Random(11).sample(sorted(known_issues.load()), 12)


def library_text(page: str) -> str:
    """All text of a page as markdown-it reads it, without any space."""
    texts = []
    for token in MarkdownIt("commonmark", {"html": True}).enable("table").parse(page):
        texts += [child.content for child in token.children or () if child.type in ("text", "code_inline")]
    return re.sub(r"\s", "", "".join(texts))


def our_text(page: str) -> str:
    texts = []
    for block in parse(page.splitlines()):
        if isinstance(block, (Heading, Paragraph)):
            texts += [span.text for span in block.line]
        elif isinstance(block, Items):
            texts += [span.text for item in block.items for line in item for span in line]
        else:
            texts += [span.text for row in (block.head, *block.rows) for cell in row for span in cell]
    return re.sub(r"\s", "", "".join(texts))


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_read_as_a_library_reads_it(name: str) -> None:
    page = "\n".join(page_of(known_issues.load()[name]))
    assert our_text(page) == library_text(page)


@pytest.mark.parametrize(
    "text",
    [
        "a|b",
        "a\\|b",
        "`x`",
        "**no**",
        "[a](b)",
        "<b>",
        "&lt;",
        "a_b _c_",
        "https://x.y",
        "www.x.y",
        "$1",
        "a\\",
        "~~x~~",
    ],
)
def test_text_that_looks_like_markup_stands_as_it_was(text: str) -> None:
    (table,) = parse([f"| {in_row(text)} | b |", "| --- | --- |", f"| c | {in_row(text)} |"])
    assert isinstance(table, Table)
    assert "".join(span.text for span in table.head[0]) == text
    assert "".join(span.text for span in table.rows[0][1]) == text
    (items,) = parse([f"- {code(text)}"])
    assert items == Items((((Span(text, "code"),),),))


def test_a_command_stays_in_one_piece_and_code_in_a_sentence_is_quoted() -> None:
    lines = [
        "- A `TypeError` whose text matches `no such thing`",
        "- Run it:",
        "  `nox -s cell -- trl=0.15.2`",
        "- So: `a b`",
    ]
    assert list(as_text(parse(lines), 20)) == [
        "- A TypeError whose",
        '  text matches "no',
        '  such thing"',
        "- Run it:",
        "    nox -s cell -- trl=0.15.2",
        "- So:",
        "    a b",
    ]


def test_a_table_is_narrowed_then_divided_at_hyphens_then_told_row_by_row() -> None:
    lines = ["| trl | verdict | why |", "| --- | --- | --- |", "| trl0.20.0-tf4.53.3 | **silent** | one two three |"]
    assert list(as_text(parse(lines), 60)) == [
        "trl                 verdict  why",
        "------------------  -------  -------------",
        "trl0.20.0-tf4.53.3  SILENT   one two three",
    ]
    assert list(as_text(parse(lines), 37)) == [
        "trl                 verdict  why",
        "------------------  -------  --------",
        "trl0.20.0-tf4.53.3  SILENT   one two",
        "                             three",
    ]
    assert list(as_text(parse(lines), 30)) == [
        "trl         verdict  why",
        "----------  -------  ---------",
        "trl0.20.0-  SILENT   one two",
        "tf4.53.3             three",
    ]
    assert list(as_text(parse(lines), 24)) == [
        "- trl:",
        "  trl0.20.0-tf4.53.3;",
        "  verdict: SILENT; why:",
        "  one two three",
    ]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_lines_fit_but_for_words_and_commands_that_do_not(width: int) -> None:
    for name in PAGES:
        for line in as_text(parse(page_of(known_issues.load()[name])), width):
            assert len(line) <= width or line.startswith("    ") or " " not in line.strip().removeprefix("- "), line


def test_what_was_written_by_others_is_no_markup_of_the_page() -> None:
    hostile = '<script>alert("1")</script>'
    page = as_html(
        parse([f"# {in_row(hostile)}", "", f"{in_row(hostile)} {code(hostile)}", "", "[a](javascript:b)"]), hostile
    )
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;") == 4
    assert "<p>a</p>" in page
