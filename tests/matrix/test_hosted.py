"""The report on a hosted run: the summary page, and annotations as GitHub reads them."""

from __future__ import annotations

import dataclasses
import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.verdict import Record, Verdict, append_record
from pytest_trlcompat.matrix.report.changes import Change, Changes
from pytest_trlcompat.matrix.report.command import main
from pytest_trlcompat.matrix.report.hosted import summary_page, workflow_commands
from pytest_trlcompat.matrix.report.model import CellReport, Report
from tests.hostile import lines

from .made_up_report import CRASH, FINE, NEW, OLD, PREDICTED, SURPRISE, UNBUILT

ISSUE = "grpo-logits-to-keep"
KNOWN = Record(ISSUE, "upstream", "zero3", Verdict.SILENT, Verdict.OK)
COMMAND = re.compile(r"::(error|warning)(?: ((?:[a-z]+=[^,:]*,?)+))?::(.*)")


def parsed(line: str) -> tuple[str, dict[str, str], str]:
    """As GitHub's runner reads a line: a kind, its properties, and the message, none of them escaped any more."""
    found = COMMAND.fullmatch(line)
    assert found is not None, line
    properties = dict(pair.split("=", 1) for pair in (found[2] or "").split(",") if pair)
    return found[1], {name: _unescaped(value) for name, value in properties.items()}, _unescaped(found[3])


def _unescaped(text: str) -> str:
    for code, character in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(code, character)
    return text


def test_an_annotation_stands_at_the_entry_of_the_catalogue() -> None:
    found = workflow_commands(Report((CellReport(OLD, (KNOWN, FINE)), CellReport(NEW, (KNOWN, PREDICTED)))))
    (one,) = map(parsed, found)
    kind, properties, message = one
    assert (kind, properties["title"]) == ("error", f"{ISSUE}: not as predicted")
    assert (
        message == f"{OLD.id}: upstream, zero3: silent, predicted ok\n{NEW.id}: upstream, zero3: silent, predicted ok"
    )
    path = Path(__file__).resolve().parents[2] / properties["file"]
    assert path == known_issues.file_of(ISSUE)
    assert path.read_text().splitlines()[int(properties["line"]) - 1] == "prediction = ["


def test_each_verdict_that_is_not_as_predicted_and_each_unfinished_cell_is_annotated() -> None:
    found = [
        parsed(line)
        for line in workflow_commands(Report((CellReport(OLD, (SURPRISE, CRASH)), CellReport(UNBUILT, ()))))
    ]
    assert [(kind, set(properties)) for kind, properties, _ in found] == [("error", {"title"}), ("warning", {"title"})]
    assert "fsdp1: silent, predicted ok\n" in found[0][2]
    assert "fsdp1-no_shard: error, predicted nothing" in found[0][2]
    assert found[1][1:] == (
        {"title": f"{UNBUILT.id}: untestable"},
        "there is no version of trl==9.9.9 | so <b>stop</b>",
    )
    assert workflow_commands(Report((CellReport(OLD, (FINE, PREDICTED)),))) == []


def test_no_more_is_annotated_than_github_shows_and_the_rest_is_counted() -> None:
    records = tuple(dataclasses.replace(KNOWN, issue=f"grpo-{number}") for number in range(25))
    found = workflow_commands(Report((CellReport(OLD, records),)))
    assert len(found) == 10
    assert found[-1] == "::error::16 more known issues; the summary and the report name them"
    assert len(workflow_commands(Report((CellReport(OLD, records[:10]),)))) == 10
    many = tuple(CellReport(dataclasses.replace(OLD, id=f"trl0.{number}.0"), (KNOWN,)) for number in range(25))
    (one,) = workflow_commands(Report(many))
    assert parsed(one)[2].splitlines()[-1] == "and 5 more"


@given(lines(), st.text(), lines())
def test_whatever_a_text_holds_it_is_one_command_a_line(issue: str, reason: str, cell: str) -> None:
    unfinished = dataclasses.replace(UNBUILT, id=cell, reason=reason)
    report = Report((CellReport(OLD, (dataclasses.replace(SURPRISE, issue=issue),)), CellReport(unfinished, ())))
    output = io.StringIO()
    with redirect_stdout(output):
        print("\n".join(workflow_commands(report)))
    found = output.getvalue().split("\n")
    assert len(found) == 3
    assert found[-1] == ""
    (first, properties, _), (second, title, _) = map(parsed, found[:2])
    assert (first, second, set(properties), set(title)) == ("error", "warning", {"title"}, {"title"})


def test_the_page_begins_with_what_is_not_as_predicted() -> None:
    change = Change(OLD.id, KNOWN.key, "ok", "2026-01-01", "silent", "torch 2.13.0 to 2.14.1")
    report = Report((CellReport(OLD, (KNOWN, FINE)), CellReport(UNBUILT, ())))
    text = summary_page(report, Changes("2026-01-01", (change,)))
    assert text.splitlines()[0] == "## 2 cells, 2 verdicts; 1 not as predicted; 1 cell not finished"
    headings = re.findall(r"^#+ .*", text, re.MULTILINE)
    assert headings[1:] == [
        "### Not as predicted",
        "### Not finished",
        "### Since the sweep published on 2026-01-01, 1 verdict changed",
    ]
    assert f"| {OLD.id} | {ISSUE} | upstream | zero3 | silent | ok |" in text
    assert f"- **{UNBUILT.id}** is untestable: there is no version of trl==9.9.9 \\| so &lt;b>stop&lt;/b>" in text
    assert "silent, ok until 2026-01-01, torch 2.13.0 to 2.14.1" in text
    assert "| silent | 1 |" in text
    fine = summary_page(Report((CellReport(OLD, (FINE,)),)), Changes())
    assert re.findall(r"^#+ .*", fine, re.MULTILINE) == ["## 1 cell, 1 verdict; all as predicted"]


def test_the_page_is_short_however_much_is_wrong() -> None:
    many = tuple(
        CellReport(dataclasses.replace(OLD, id=f"trl0.{number}.0", reason="x" * 10_000, state="interrupted"), (KNOWN,))
        for number in range(500)
    )
    text = summary_page(Report(many), Changes())
    assert text.count(f"| {ISSUE} |") == 50
    assert text.count("And 450 more, all in `compat.html` of the artifacts.") == 2
    assert len(text) < 40_000


@given(lines(), st.text())
def test_whatever_a_text_holds_the_page_has_the_same_elements(issue: str, reason: str) -> None:
    def page(record: Record, why: str) -> list[str]:
        unfinished = dataclasses.replace(UNBUILT, reason=why)
        text = summary_page(Report((CellReport(OLD, (record,)), CellReport(unfinished, ()))), Changes())
        tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(text)
        return [each for token in tokens for each in (token.type, *inner(token))]

    def inner(token: Token) -> list[str]:
        found = [child.type for child in token.children or () if child.type not in ("text", "text_special")]
        return found if found or not token.content else ["text"]

    assert page(dataclasses.replace(SURPRISE, issue=issue or "x"), reason) == page(SURPRISE, "plain")


def test_the_program_appends_the_page_and_prints_annotations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, page = tmp_path / "compat", tmp_path / "summary.md"
    results.mkdir()
    (results / f"{OLD.id}.cell.json").write_text(dataclasses.replace(OLD, issues=()).to_json())
    append_record(results / f"{OLD.id}.jsonl", dataclasses.replace(SURPRISE, issue="unknown"))
    page.write_text("before\n")
    assert main([str(results), "--summary", str(page), "--annotations"]) == 0
    text = page.read_text()
    assert text.startswith("before\n## 1 cell, 1 verdict; 1 not as predicted\n")
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("::error title=unknown%3A not as predicted::trl0.9.6-tf4.42.4: upstream, ")
    assert main([str(results), "--summary", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"--summary {tmp_path}: Is a directory; name a file, as $GITHUB_STEP_SUMMARY does\n"
    )
