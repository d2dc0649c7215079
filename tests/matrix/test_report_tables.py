"""The tables of Markdown and of the terminal, and the rows that many cells share."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_trlcompat.catalog import known_issues, remedies
from pytest_trlcompat.catalog.verdict import Record, Verdict
from pytest_trlcompat.matrix.report import pages, terminal
from pytest_trlcompat.matrix.report.model import Report, gather
from pytest_trlcompat.matrix.report.rows import MANY, rows

from .made_up_report import FINE, NEW, OLD


def test_a_known_issue_is_introduced_from_the_catalogue(report: Report) -> None:
    issue = known_issues.load()["grpo-logits-to-keep"]
    known = dataclasses.replace(FINE, issue=issue.id)
    shown = Report((dataclasses.replace(report.cells[0], verdicts=(known,)),))
    page = pages.markdown(shown)
    assert issue.title in page
    assert all(link in page for link in issue.upstream)
    assert f"Needs no cure from {remedies.cured_in(issue)}." in page


def test_markdown_has_a_table_for_each_issue_and_a_row_for_each_cell(report: Report) -> None:
    lines = pages.markdown(report).splitlines()
    table = lines[lines.index("## grpo-a") + 2 :][:5]
    anchor = "trl1.0.0-tf4.57.6--grpo-a--upstream--"
    assert table == [
        "| cell | upstream zero3 | upstream fsdp1 | upstream fsdp1-no_shard |",
        "| --- | --- | --- | --- |",
        "| trl0.9.6-tf4.42.4 | - | - | - |",
        f"| trl1.0.0-tf4.57.6 | [absent](#{anchor}zero3) | ❌ **[silent](#{anchor}fsdp1)** | "
        f"❌ **[error](#{anchor}fsdp1-no_shard)** |",
        "| trl9.9.9 | untestable | untestable | untestable |",
    ]
    assert f'<a id="{anchor}fsdp1"></a>' in lines
    assert "max_abs_error: 0.3" in lines
    assert "- **trl9.9.9**: untestable: there is no version of trl==9.9.9 \\| so &lt;b>stop&lt;/b>" in lines


def test_the_terminal_shows_tables_what_is_wrong_and_where_the_evidence_lies(report: Report) -> None:
    file = io.StringIO()
    terminal.show_tables(report, [Path("build/compat/compat.json"), Path("build/compat/compat.html")], file)
    text = file.getvalue()
    assert "\x1b" not in text  # no terminal
    cells = [[part.strip() for part in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert cells == [
        ["trl0.9.6-tf4.42.4", "-", "-", "-"],
        ["trl1.0.0-tf4.57.6", "absent", "✗ silent", "✗ error"],
        ["trl9.9.9", "untestable", "untestable", "untestable"],
        ["trl0.9.6-tf4.42.4", "-", "ok"],
        ["trl1.0.0-tf4.57.6", "broken", "ok"],
        ["trl9.9.9", "untestable", "untestable"],
    ]
    assert " not as predicted  trl1.0.0-tf4.57.6: grpo-a, upstream, fsdp1: silent, predicted ok\n" in text
    assert (
        " not as predicted  trl1.0.0-tf4.57.6: grpo-a, upstream, fsdp1-no_shard: error, nothing was predicted" in text
    )
    assert " untestable  trl9.9.9: there is no version of trl==9.9.9" in text
    assert text.splitlines()[-2:] == [
        "3 cells, 6 verdicts; 2 not as predicted; 1 cell not finished",
        "evidence: build/compat/ (compat.json, compat.html)",
    ]


def test_cells_without_verdicts_of_many_share_no_row_with_those_that_have(results: Callable[..., Path]) -> None:
    report = many(results, interrupted="trl1.3.0-tf5.0.0")
    assert [row.labels for row in rows(report, report.columns)] == [
        ("1.0.0 to 1.2.0", "4.56.2 to 5.0.0", "6"),
        ("1.3.0", "4.56.2", "1"),
        ("1.3.0", "5.0.0", "1"),
        ("1.4.0 to 1.5.0", "4.56.2 to 5.0.0", "4"),
    ]


def test_of_many_cells_those_that_follow_each_other_and_agree_share_a_row(results: Callable[..., Path]) -> None:
    report = many(results, wrong="trl1.4.0-tf4.56.2", accelerate="1.5.0")
    assert [(row.labels, row.first.id) for row in rows(report, report.columns)] == [
        (("1.0.0 to 1.3.0", "4.56.2 to 5.0.0", "8"), "trl1.0.0-tf4.56.2"),
        (("1.4.0", "4.56.2", "1"), "trl1.4.0-tf4.56.2"),
        (("1.4.0", "5.0.0", "1"), "trl1.4.0-tf5.0.0"),
        (("1.5.0", "4.56.2", "1"), "trl1.5.0-tf4.56.2"),
        (("trl1.5.0-tf4.56.2-accelerate1.5.0", "", "1"), "trl1.5.0-tf4.56.2-accelerate1.5.0"),
        (("1.5.0", "5.0.0", "1"), "trl1.5.0-tf5.0.0"),
    ]
    few = Report(report.cells[: MANY - 1])
    assert [row.cells for row in rows(few, few.columns)] == [(cell,) for cell in few.cells]


def test_the_terminal_and_markdown_show_the_shared_rows_of_many_cells(results: Callable[..., Path]) -> None:
    report = many(results, wrong="trl1.4.0-tf4.56.2")
    file = io.StringIO()
    terminal.show_tables(report, file=file)
    lines = [
        [part.strip() for part in line.split("│")[1:-1]]
        for line in file.getvalue().splitlines()
        if line.startswith("│")
    ]
    assert lines == [
        ["1.0.0 to 1.3.0", "4.56.2 to 5.0.0", "8", "ok"],
        ["1.4.0", "4.56.2", "1", "✗ silent"],
        ["1.4.0", "5.0.0", "1", "ok"],
        ["1.5.0", "4.56.2 to 5.0.0", "2", "ok"],
    ]
    page = pages.markdown(report).splitlines()
    table = page[page.index("## grpo-b") + 2 :][:6]
    assert table == [
        "| trl | transformers | cells | corrected single |",
        "| --- | --- | --: | --- |",
        "| 1.0.0 to 1.3.0 | 4.56.2 to 5.0.0 | 8 | ok |",
        "| 1.4.0 | 4.56.2 | 1 | ❌ **[silent](#trl1.4.0-tf4.56.2--grpo-b--corrected--single)** |",
        "| 1.4.0 | 5.0.0 | 1 | ok |",
        "| 1.5.0 | 4.56.2 to 5.0.0 | 2 | ok |",
    ]
    # Every cell is listed with what it was resolved to; evidence is there of what is wrong alone.
    listed = page.index("| trl1.0.0-tf4.56.2 | 2026-04-02 | 1.13.0 | - | - | - | - | 1 | 12 |")
    assert page[listed + 11].startswith("| trl1.5.0-tf5.0.0 | 2026-04-02 |")
    assert [line for line in page if line.startswith("### ")] == ["### trl1.4.0-tf4.56.2"]


def test_a_table_that_is_wider_than_the_terminal_is_cut_between_subjects_first(results: Callable[..., Path]) -> None:
    strategies = ["single", "ddp", "zero2", "zero3", "fsdp1", "fsdp1-no_shard", "fsdp2"]
    records = tuple(
        Record("grpo-b", subject, strategy, Verdict.OK, Verdict.OK)
        for subject in ("upstream", "corrected")
        for strategy in strategies
    )
    report = gather(results((NEW, records), (OLD, records)))

    def heads(columns: int) -> list[list[str]]:
        file = io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", str(columns))
            terminal.show_tables(report, file=file)
        lines = file.getvalue().splitlines()
        assert max(map(len, lines)) <= columns
        assert lines.count("grpo-b".ljust(len(lines[0]))) >= 1
        return [line.replace("┃", " ").split() for line in lines if "single" in line or "fsdp2" in line]

    assert heads(250) == [["cell", *strategies, *strategies]]
    assert heads(140) == [["cell", *strategies], ["cell", *strategies]]
    assert heads(100) == [["cell", *strategies[:5]], ["cell", *strategies[5:]]] * 2


def many(
    results: Callable[..., Path], *, wrong: str = "", interrupted: str = "", accelerate: str | None = None
) -> Report:
    """Twelve cells that agree, but for those named, and another one with one more pin."""
    cells = []
    for minor in range(6):
        for transformers in ("4.56.2", "5.0.0"):
            pins = {"trl": f"1.{minor}.0", "transformers": transformers}
            cell_id = f"trl1.{minor}.0-tf{transformers}"
            verdict = Verdict.SILENT if cell_id == wrong else Verdict.OK
            state = "interrupted" if cell_id == interrupted else "tested"
            sidecar = dataclasses.replace(NEW, id=cell_id, pins=pins, state=state)
            cells.append((sidecar, (Record("grpo-b", "corrected", "single", verdict, Verdict.OK),)))
    if accelerate:
        extra = dataclasses.replace(
            sidecar,
            id=f"trl1.5.0-tf4.56.2-accelerate{accelerate}",
            pins={"trl": "1.5.0", "transformers": "4.56.2", "accelerate": accelerate},
        )
        cells.append((extra, (FINE,)))
    return gather(results(*cells))
