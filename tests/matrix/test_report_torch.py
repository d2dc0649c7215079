"""What differs with torch alone, in every form of the report."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.catalog.verdict import Record, Verdict
from pytest_trlcompat.matrix.report import explorer, pages, terminal
from pytest_trlcompat.matrix.report.command import main, write_all
from pytest_trlcompat.matrix.report.model import Report, gather
from pytest_trlcompat.matrix.report.rows import rows
from pytest_trlcompat.matrix.report.torch_comparison import compare

from .made_up_report import NEW


def with_torch(
    torch: str, verdict: Verdict, trl: str = "0.15.2", *, default: bool = False, python: str | None = None
) -> Any:
    """A cell that differs from others in torch, and its one verdict."""
    pins = {"trl": trl, "transformers": "4.48.3", "torch": torch}
    cell_id = f"trl{trl}-tf4.48.3" + ("" if default else f"-torch{torch}") + (f"-py{python}" if python else "")
    lock = {"torch": torch, "trl": trl}
    sidecar = dataclasses.replace(NEW, id=cell_id, pins=pins, lock=lock, python=python)
    return sidecar, (Record("grpo-b", "upstream", "zero3", verdict, verdict),)


def test_verdicts_that_change_with_torch_alone_are_told_with_their_issue(
    results: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = results(
        with_torch("2.4.1", Verdict.BROKEN),
        with_torch("2.5.1", Verdict.BROKEN),
        with_torch("2.6.0", Verdict.BROKEN),
        with_torch("2.13.0", Verdict.OK, default=True),
        with_torch("2.15.0", Verdict.UNTESTABLE),
        with_torch("2.6.0", Verdict.OK, "0.16.1"),
        with_torch("2.13.0", Verdict.OK, "0.16.1", default=True),
        with_torch("2.6.0", Verdict.SILENT, "0.17.0"),
        with_torch("2.6.0", Verdict.SILENT, python="3.10"),  # another Python: not torch alone
    )
    report = gather(folder)
    assert report.summary == (
        "9 cells, 9 verdicts, torch 2.4.1 to 2.15.0; all as predicted; "
        "1 could not be tested, by the software accelerator"
    )
    found = compare(report.cells, report.columns)
    shown = "upstream, zero3 (trl 0.15.2, transformers 4.48.3): broken with torch 2.4.1 to 2.6.0, ok with torch 2.13.0"
    assert [change.describe() for change in found.of("grpo-b")] == [shown]
    assert found.of("grpo-a") == []
    summary = "torch alone changes 1 of 2 verdicts that were measured with more than one torch"
    assert found.summary == summary
    write_all(report, folder)
    assert json.loads((folder / "compat.json").read_text())["torch_alone"] == {
        "compared": 2,
        "changes": [
            {
                "issue": "grpo-b",
                "subject": "upstream",
                "strategy": "zero3",
                "pins": "trl 0.15.2, transformers 4.48.3",
                "verdicts": {"2.4.1": "broken", "2.5.1": "broken", "2.6.0": "broken", "2.13.0": "ok"},
            }
        ],
    }
    markdown = (folder / "compat.md").read_text()
    assert f"With another torch alone:\n\n- {shown}\n\n| cell |" in markdown
    assert f"\n- {summary}\n" in markdown
    html = (folder / "compat.html").read_text()
    assert f"<li>grpo-b, {shown}</li>" in html
    assert f"<summary>{summary.capitalize()}.</summary>" in html
    main([str(folder), "--sweep", "now", "--tables"])
    printed = capsys.readouterr().out
    assert f"grpo-b, {shown}\n{summary}\n" in printed


def test_where_nothing_was_compared_nothing_is_said_of_torch(results: Callable[..., Path]) -> None:
    report = gather(results(with_torch("2.6.0", Verdict.OK), with_torch("2.13.0", Verdict.OK, "0.16.1")))
    assert compare(report.cells, report.columns).summary == ""
    assert "torch alone" not in pages.markdown(report) + explorer.html(report)
    none = Report((), ())
    assert (compare(none.cells, none.columns).summary, none.summary) == (
        "",
        "0 cells, 0 verdicts; nothing was measured",
    )


def test_that_torch_changes_nothing_is_said(results: Callable[..., Path]) -> None:
    report = gather(results(with_torch("2.6.0", Verdict.OK), with_torch("2.13.0", Verdict.OK, default=True)))
    found = compare(report.cells, report.columns)
    assert found.summary == "torch alone changes none of 1 verdict that was measured with more than one torch"


def test_the_torch_of_each_cell_is_named_where_cells_differ_in_it(results: Callable[..., Path]) -> None:
    cells = (with_torch("2.6.0", Verdict.OK), with_torch("2.13.0", Verdict.OK, default=True))
    report = gather(results(*cells))
    names = ["trl0.15.2-tf4.48.3-torch2.6.0", "trl0.15.2-tf4.48.3 (torch 2.13.0)"]
    assert [report.name(cell) for cell in report.cells] == names
    assert [report.short(cell) for cell in report.cells] == ["4.48.3 torch 2.6.0", "4.48.3 torch 2.13.0"]
    file = io.StringIO()
    terminal.show_tables(report, file=file)
    for shown in (file.getvalue(), pages.markdown(report), explorer.html(report)):
        assert all(name in shown for name in names)
    summary = io.StringIO()
    terminal.show(report, file=summary)
    assert all(name in summary.getvalue() for name in names)
    (alone,) = Report(report.cells[1:]).cells
    assert (Report((alone,)).name(alone), Report((alone,)).short(alone)) == ("trl0.15.2-tf4.48.3", "4.48.3")


def test_of_many_cells_torch_is_an_axis_of_the_table_where_they_differ_in_it(results: Callable[..., Path]) -> None:
    one_torch = [with_torch("2.13.0", Verdict.OK, f"1.{minor}.0", default=True) for minor in range(12)]
    report = gather(results(*one_torch))
    assert [row.labels for row in rows(report, report.columns)] == [("1.0.0 to 1.11.0", "4.48.3", "12")]
    old = [with_torch("2.6.0", Verdict.OK, "1.0.0"), with_torch("2.6.0", Verdict.BROKEN, "1.1.0")]
    report = gather(results(*old))
    assert [row.labels for row in rows(report, report.columns)] == [
        ("1.0.0", "4.48.3", "2.6.0 to 2.13.0", "2"),
        ("1.1.0", "4.48.3", "2.6.0", "1"),
        ("1.1.0", "4.48.3", "2.13.0", "1"),
        ("1.2.0 to 1.11.0", "4.48.3", "2.13.0", "10"),
    ]
    page = pages.markdown(report)
    assert "| trl | transformers | torch | cells | upstream zero3 |\n| --- | --- | --- | --: | --- |\n" in page
    file = io.StringIO()
    terminal.show_tables(report, file=file)
    assert "2.6.0 to 2.13.0" in file.getvalue()
