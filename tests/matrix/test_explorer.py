"""The page that one explores, as it is written: one file, safe whatever libraries said. In a browser: tests/browser."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from pytest_trlcompat._escaping import printable
from pytest_trlcompat.catalog import evidence, known_issues
from pytest_trlcompat.catalog.verdict import Record, Verdict
from pytest_trlcompat.matrix.report.explorer import html
from pytest_trlcompat.matrix.report.model import CellReport, Report
from pytest_trlcompat.matrix.report.publish import report_of
from pytest_trlcompat.matrix.results import Sidecar

EVIL = "<img src=x onerror=alert(1)></script><script>alert(2)</script>\x00\x1b[31m \ud800 & ]]> <!--"
OLD = Sidecar(
    "trl0.15.2-tf4.48.3",
    {"trl": "0.15.2", "transformers": "4.48.3"},
    "tested",
    "now",
    lock={"accelerate": "1.4.0", "trl": "0.15.2", "odd": EVIL},
    date="2025-02-28",
    seconds=12.5,
)
NEW = dataclasses.replace(OLD, id="trl1.0.0-tf4.57.6", pins={"trl": "1.0.0", "transformers": "4.57.6"}, lock={})
UNBUILT = Sidecar("trl9.9.9", {"trl": "9.9.9"}, "untestable", "now", reason=f"there is no such version {EVIL}")
ISSUE = "grpo-logits-to-keep"
VERDICTS = (
    Record(ISSUE, "upstream", "single", Verdict.WASTEFUL, Verdict.WASTEFUL, {"text": EVIL, "n": 3}, 1.25),
    Record(ISSUE, "upstream", "single-neither", Verdict.SILENT, Verdict.OK, {}),
    Record(ISSUE, "corrected", "single", Verdict.OK, Verdict.OK, {}),
    Record("ppo-ddp-save", "upstream", "ddp", Verdict.ABSENT, Verdict.ABSENT, {"reason": "none"}),
    Record("of-nobody", "upstream", "zero3", Verdict.ERROR, None, {}),
)


class Page(HTMLParser):
    """The tags of a page with their attributes, and the text of its scripts, by id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.text = ""
        self._script: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._script = dict(attrs).get("id") or tag
            self.scripts[self._script] = ""

    def handle_endtag(self, tag: str) -> None:
        self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is None:
            self.text += data
        else:
            self.scripts[self._script] += data

    @property
    def data(self) -> Any:
        return json.loads(self.scripts["data"])

    def unpacked(self, number: int) -> Any:
        return json.loads(gzip.decompress(base64.b64decode(self.scripts[f"evidence-{number}"])))


@pytest.fixture
def report() -> Report:
    cells = (CellReport(OLD, VERDICTS), CellReport(NEW, VERDICTS[2:3]), CellReport(UNBUILT, ()))
    return Report(cells, unmeasured=(f"a boundary {EVIL}",))


@pytest.fixture
def page(report: Report) -> Page:
    return Page(html(report))


def test_what_libraries_said_cannot_become_markup(page: Page) -> None:
    names = {tag for tag, _ in page.tags}
    assert "img" not in names
    assert names.isdisjoint({"iframe", "object", "link", "base"})
    assert not [attribute for _, attributes in page.tags for attribute in attributes if attribute.startswith("on")]
    assert [a.get("id") for tag, a in page.tags if tag == "script"] == [
        "data",
        None,
        "evidence-0",
        "evidence-1",
        "evidence-2",
    ]
    assert "alert(" not in page.scripts["script"]
    assert not set("<>&") & set(page.scripts["data"])
    assert page.text.count("alert(2)") == 2  # of the unfinished cell and of the boundary, as text


def test_the_page_can_be_written_and_its_data_hold_what_was_said(report: Report, page: Page) -> None:
    html(report).encode("utf-8")
    assert not re.search("[\x00-\x08\x1b\ud800-\udfff]", html(report))
    text = f"text: {printable(EVIL)}\nn: 3"
    assert page.unpacked(2)["evidence"]["0"] == {"text": text, "seconds": 1.2, "expected": "wasteful"}
    assert page.unpacked(2)["packages"]["odd"] == EVIL


def test_nothing_is_loaded_and_nothing_runs_but_its_own_script(page: Page) -> None:
    assert [a for _, a in page.tags if {"src", "href", "action", "data"} & set(a)] == []
    (policy,) = (a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a)
    digests = [
        base64.b64encode(hashlib.sha256(page.scripts[name].encode()).digest()).decode() for name in ("script", "style")
    ]
    assert policy == (
        f"default-src 'none'; script-src 'sha256-{digests[0]}'; style-src 'sha256-{digests[1]}'; base-uri 'none'"
    )
    assert not re.search(r"@import|url\(", page.scripts["style"])
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|Function\(", page.scripts["script"]
    )
    assert "prefers-color-scheme: dark" in page.scripts["style"]


def test_the_newest_cell_comes_first_and_issues_are_grouped_by_trainer(page: Page) -> None:
    data = page.data
    assert [cell["id"] for cell in data["cells"]] == ["trl9.9.9", NEW.id, OLD.id]
    assert [issue["id"] for issue in data["issues"]] == [ISSUE, "ppo-ddp-save", "of-nobody"]
    groups = [(a["data-trainer"], a["colspan"]) for _, a in page.tags if "data-trainer" in a]
    assert groups == [("grpo", "1"), ("ppo", "1"), ("", "1")]
    known = known_issues.load()[ISSUE]
    assert (data["issues"][0]["title"], data["issues"][0]["upstream"]) == (known.title, list(known.upstream))
    assert data["issues"][2]["title"] == ""


def test_releases_with_which_most_of_the_sweep_fails_are_marked() -> None:
    lock = {"trl": "1.0.0", "transformers": "4.57.6"}
    for verdict, mark in (
        (Verdict.OK, ""),
        (Verdict.ERROR, " (most of what was measured there fails for another reason)"),
    ):
        records = (Record(ISSUE, "upstream", "single", verdict, verdict, {}),)
        cell = CellReport(dataclasses.replace(NEW, lock=lock), records)
        remedy = Page(html(Report((cell,)))).data["issues"][0]["remedy"]
        assert f" take trl >=0.15 with transformers >=4.49{mark}, or transformers " in remedy


def test_every_verdict_is_in_the_data_by_its_column(page: Page) -> None:
    data = page.data
    assert data["columns"] == [
        [0, 0, "single"],
        [0, 0, "single-neither"],
        [0, 1, "single"],
        [2, 0, "zero3"],
        [1, 0, "ddp"],
    ]
    letters = {each["name"]: each["letter"] for each in data["verdicts"]}
    assert len(set(letters.values())) == len(Verdict)
    assert [cell["verdicts"] for cell in data["cells"]] == [".....", "..✓..", "WS✓E-"]
    assert data["cells"][2]["wrong"] == {"1": "ok", "3": ""}
    assert [each["problem"] for each in data["verdicts"]] == [
        Verdict(each["name"]).is_problem for each in data["verdicts"]
    ]


def test_without_javascript_the_table_shows_the_worst_verdict_of_each_issue(report: Report) -> None:
    assert '<noscript><p class="note">Without JavaScript this is the table for TRL\'s own trainers; ' in html(report)
    table = re.search(r"<tbody>(.*)</tbody>", html(report), re.DOTALL)
    assert table is not None
    rows = re.findall(r'<th scope="row">(.*?)</th>(.*?)</tr>', table[1])
    assert [re.findall(r"<td(?: class=\"([\w ]+)\")?>(.?)</td>", cells) for _, cells in rows] == [
        [("", ""), ("", ""), ("", "")],
        [("", ""), ("", ""), ("", "")],
        [("silent wrong", "S"), ("absent", "-"), ("error wrong", "E")],
    ]
    assert [head for head, _ in rows] == [
        "<b>9.9.9</b> trl9.9.9 <i>untestable</i>",
        "<b>1.0.0</b> 4.57.6",
        "<b>0.15.2</b> 4.48.3",
    ]


def test_what_is_not_as_predicted_and_what_was_not_finished_stand_first(report: Report) -> None:
    text = html(report)
    assert "<h2>2 not as predicted</h2>" in text
    assert f"<li>{OLD.id}: {ISSUE}, upstream, single-neither: silent, predicted ok</li>" in text
    assert f"<li>{OLD.id}: of-nobody, upstream, zero3: error, nothing was predicted</li>" in text
    assert "<li>trl9.9.9 is untestable: there is no such version &lt;img" in text
    assert text.index("not as predicted</h2>") < text.index('id="controls"')
    fine = html(Report((CellReport(NEW, VERDICTS[2:3]),)))
    assert 'class="alarm"' not in fine


def test_of_many_surprises_the_first_ten_are_listed_and_the_rest_folded() -> None:
    surprises = tuple(Record(f"i{n:02}", "upstream", "single", Verdict.SILENT, Verdict.OK) for n in range(12))
    text = html(Report((CellReport(NEW, surprises),)))
    assert "<h2>12 not as predicted</h2>" in text
    assert "<details><summary>2 more</summary><ul><li>trl1.0.0-tf4.57.6: i10, " in text


def test_the_page_is_the_same_whenever_it_is_made(report: Report) -> None:
    assert html(report) == html(report)


def test_a_published_page_has_no_evidence_and_says_so() -> None:
    page = Page(html(report_of(evidence.published()), evidence=False, title="Published"))
    assert page.data["published"] is True
    assert not [name for name in page.scripts if name.startswith("evidence-")]
    assert sum(len(cell["verdicts"]) - cell["verdicts"].count(".") for cell in page.data["cells"]) == sum(
        len(cell.verdicts) for cell in evidence.published().cells
    )
