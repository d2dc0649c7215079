"""Verdicts that the software accelerator could not give: counted by themselves, with their reason, in every form."""

from __future__ import annotations

import io
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pytest_trlcompat.accelerator.artefacts import Artefact, What
from pytest_trlcompat.catalog.verdict import Record, Verdict
from pytest_trlcompat.matrix.report import explorer, junit, pages, terminal
from pytest_trlcompat.matrix.report.model import CellReport, Report
from pytest_trlcompat.matrix.results import Outcome, Sidecar

REASON = Artefact(What.OPERATOR, "aten::foo<int> for npu", "it has no such kernel", "2.9.1").describe()
OTHER = Artefact(What.BRANCH, "trl/utils.py:3", "no GPU goes there, only where is_npu()", "2.9.1").describe()


def untested(subject: str, strategy: str, reason: str = REASON, expected: Verdict | None = Verdict.BROKEN) -> Record:
    return Record("grpo-a", subject, strategy, Verdict.UNTESTABLE, expected, {"reason": reason}, 1.0)


FINE = Record("grpo-a", "corrected", "single", Verdict.OK, Verdict.OK)
GONE = Record("grpo-a", "upstream", "fsdp2", Verdict.ABSENT, Verdict.ABSENT, {"reason": "no FSDP2"})
SIDECAR = Sidecar("trl1.0.0-tf4.57.6", {"trl": "1.0.0", "transformers": "4.57.6"}, "tested", "now", seconds=2.0)
UPSTREAM = (
    untested("upstream", "zero2", OTHER),
    untested("upstream", "ddp"),
    untested("upstream", "zero3", expected=None),
)


@pytest.fixture
def report() -> Report:
    return Report((CellReport(SIDECAR, (FINE, *UPSTREAM, untested("corrected", "ddp", expected=Verdict.OK))),))


def test_they_are_counted_by_themselves_and_none_is_a_wrong_prediction(report: Report) -> None:
    assert report.wrong == []
    assert report.summary == (
        "1 cell, 5 verdicts; all as predicted; 4 could not be tested, by the software accelerator "
        "(1 of corrected trainers)"
    )
    assert report.counts == {Verdict.OK: 1, Verdict.UNTESTABLE: 4}
    assert [(reason, len(alike)) for reason, alike in report.untested] == [(REASON, 3), (OTHER, 1)]
    without = Report((CellReport(SIDECAR, (FINE, *UPSTREAM)),))
    assert without.summary.endswith("; 3 could not be tested, by the software accelerator")
    nothing = Report((CellReport(SIDECAR, UPSTREAM),))
    assert (
        nothing.summary
        == "1 cell, 3 verdicts; nothing was measured; 3 could not be tested, by the software accelerator"
    )


def test_the_summary_counts_them_by_reason(report: Report) -> None:
    file = io.StringIO()
    terminal.show(report, file=file)
    text = " ".join(file.getvalue().split())
    assert f"3 untestable: {REASON} 1 untestable: {OTHER} " in text


def test_the_terminal_says_why_once_for_each_reason(report: Report) -> None:
    file = io.StringIO()
    terminal.show_tables(report, file=file)
    lines = file.getvalue().splitlines()
    first = f" not tested  trl1.0.0-tf4.57.6: grpo-a, upstream, ddp, and 2 more: {REASON}"
    assert [line for line in lines if line.startswith(" not tested")] == [
        first,
        f" not tested  trl1.0.0-tf4.57.6: grpo-a, upstream, zero2: {OTHER}",
    ]
    assert lines[-1] == report.summary


def test_the_pages_say_why(report: Report) -> None:
    markdown, html = pages.markdown(report), explorer.html(report)
    assert "## Not tested, by the software accelerator" in markdown
    (line,) = (line for line in markdown.splitlines() if line.startswith("- This is a limit") and "aten::foo" in line)
    assert line.startswith(f"- {REASON.replace('<', '&lt;')} 3 ")
    assert line.endswith(
        "trl1.0.0-tf4.57.6: grpo-a, upstream, ddp; trl1.0.0-tf4.57.6: grpo-a, upstream, zero3; "
        "trl1.0.0-tf4.57.6: grpo-a, corrected, ddp"
    )
    assert "the environment cannot be built, or the software accelerator cannot do" in markdown
    assert "<summary>Not tested, by the software accelerator</summary>" in html
    assert re.search(r"<li>3 . This is a limit .*aten::foo&lt;int&gt; for npu", html)
    assert "<small>trl1.0.0-tf4.57.6: grpo-a, upstream, zero2</small>" in html


def test_pages_without_them_say_nothing_of_it() -> None:
    report = Report((CellReport(SIDECAR, (FINE,)),))
    assert "Not tested" not in pages.markdown(report) + explorer.html(report)


def test_in_junit_they_are_skipped_with_the_reason(report: Report) -> None:
    (suite,) = ElementTree.fromstring(junit.junit(report).encode())
    assert [suite.get(name) for name in ("tests", "failures", "skipped")] == ["5", "0", "4"]
    skips = {case.get("name"): skipped for case in suite.iter("testcase") for skipped in case.iter("skipped")}
    assert {(each.get("type"), each.get("message")) for each in skips.values()} == {
        ("untestable", REASON),
        ("untestable", OTHER),
    }


def test_a_cell_of_which_nothing_could_be_tested_fails(tmp_path: Path) -> None:
    assert Outcome(SIDECAR, (FINE, *UPSTREAM), 0).problem is None
    assert Outcome(SIDECAR, (GONE,), 0).problem is None
    assert Outcome(SIDECAR, (GONE, *UPSTREAM), 0).problem == f"trl1.0.0-tf4.57.6: nothing could be tested. {OTHER}"
