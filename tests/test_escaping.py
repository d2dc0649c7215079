"""What others said stays text in every form, whatever it is: rendered and parsed by real parsers."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_trlcompat._escaping import code, fenced, in_block, in_html, in_row, one_line, printable, script_json
from tests.hostile import EVIL, Parsed, lines, rendered, texts

pytestmark = pytest.mark.fuzz


def names(html: str) -> list[str]:
    return [name for (name, _), number in Parsed(html).tags.items() for _ in range(number)]


@given(texts())
@example(EVIL)
def test_a_cell_of_a_markdown_table_holds_its_text_and_nothing_else(text: str) -> None:
    html = rendered(f"| a | b |\n| --- | --- |\n| {in_row(text)} | end |\n\nafter\n")
    assert names(html) == ["table", "thead", "tr", "tr", "th", "th", "tbody", "td", "td", "p"]
    cells = Parsed(html).text.split("\n")
    assert [cell for cell in cells if cell][2:] == [*([one_line(text)] if one_line(text) else []), "end", "after"]


@given(lines())
@example("1. x")
@example("(t)=")
@example("___")
def test_an_entry_of_a_markdown_list_holds_its_text_and_nothing_else(text: str) -> None:
    html = rendered(f"- {in_block(text)}\n- end\n")
    assert names(html) == ["ul", "li", "li"]
    assert Parsed(html).text.strip().split("\n") == [one_line(text), "end"]


@given(lines())
def test_a_markdown_paragraph_and_a_heading_hold_their_text(text: str) -> None:
    html = rendered(f"{in_block(text)}\n\n# of {in_row(text)}.\n")
    assert names(html) == ["p", "h1"]
    assert Parsed(html).text.strip().split("\n") == [one_line(text), f"of {one_line(text)}."]


@given(texts())
def test_inline_code_holds_its_text(text: str) -> None:
    html = rendered(f"- the {code(text)} end\n")
    shown = one_line(text)
    assert names(html) == (["ul", "li", "code"] if shown else ["ul", "li"])
    assert Parsed(html).text.strip() == (f"the {shown} end" if shown else "the  end")


@given(texts(12), st.sampled_from(["", "text", "sh"]))
@example("````", "text")
@example(EVIL, "text")
def test_a_fence_cannot_be_closed_from_within(text: str, language: str) -> None:
    html = rendered(f"{fenced(text, language)}\n\nafter\n")
    assert names(html) == ["pre", "code", "p"]
    assert Parsed(html).text == f"{printable(text)}\n\nafter\n"


@given(texts())
def test_html_in_markdown_holds_its_text(text: str) -> None:
    html = rendered(f'<details title="{in_html(text)}"><summary>{in_html(text)}</summary>\n\nbody\n\n</details>\n')
    parsed = Parsed(html)
    assert names(html) == ["details", "summary", "p"]
    assert ("details", (("title", one_line(text)),)) in parsed.tags
    assert parsed.text.startswith(f"{one_line(text)}\n")


@given(texts())
def test_xml_and_utf_8_can_hold_what_is_printable(text: str) -> None:
    element = ElementTree.Element("a", value=printable(text))
    element.text = printable(text)
    read = ElementTree.fromstring(ElementTree.tostring(element, encoding="utf-8", xml_declaration=True))
    assert (read.text or "", read.get("value")) == (printable(text), printable(text))


@given(texts())
def test_a_terminal_obeys_nothing_that_is_printable(text: str) -> None:
    shown = printable(text)
    assert len(shown) == len(text)
    assert set(shown).isdisjoint(OBEYED)
    assert printable(shown) == shown
    assert set(one_line(text)).isdisjoint("\n\t")


OBEYED = {*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)), *"\u061c\u200e\u200f\u2028\u2029\u202a\u202e\u2066"} - {
    *"\t\n"
}
"""Control characters, and those that change the direction of text or end a line."""


@given(st.recursive(texts(), lambda inner: st.dictionaries(texts(2), inner, max_size=3), max_leaves=5))
def test_a_script_element_holds_its_json(value: object) -> None:
    page = f'<p>a</p><script type="application/json">{script_json({"x": value})}</script><p>b</p>'
    parsed = Parsed(page)
    assert sorted(names(page)) == ["p", "p", "script"]
    assert json.loads(parsed.scripts[0]) == {"x": value}
    assert parsed.scripts[0].isascii()
    assert set("<>&").isdisjoint(parsed.scripts[0])


def test_the_text_of_names_and_versions_stays_readable() -> None:
    assert in_row("a_b per_device_train_batch_size trl >=0.15, <0.18 x.py:3 (y)") == (
        "a_b per_device_train_batch_size trl >=0.15, &lt;0.18 x.py:3 (y)"
    )
    assert in_row("__init__ and _private") == "\\_\\_init\\_\\_ and \\_private"
    assert in_row("see https://a.b or www.c.d") == "see https\\://a.b or www\\.c.d"
    starts = ("- a", "12) b", "#1", "12 b", "(t)=", "% c", ": d")
    assert [*map(in_block, starts)] == ["\\- a", "12\\) b", "\\#1", "12 b", "\\(t)=", "\\% c", "\\: d"]
    assert code("a`b``c") == "``` a`b``c ```"
    assert fenced("a\n`````\nb", "sh", 4) == "``````sh\na\n`````\nb\n``````"
    assert printable("\x1b[31mred\u202e\ud800\tok") == "\ufffd[31mred\ufffd\ufffd\tok"
