"""The report: one model, five forms; what is not as predicted stands out, and every verdict links its evidence."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pytest_trlcompat.catalog import known_issues, remedies
from pytest_trlcompat.catalog.verdict import Record, Verdict, append_record
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.report import explorer, junit, pages, terminal
from pytest_trlcompat.matrix.report.command import main, write_all
from pytest_trlcompat.matrix.report.model import Report, gather
from pytest_trlcompat.matrix.report.rows import MANY, rows
from pytest_trlcompat.matrix.report.torch_comparison import compare
from pytest_trlcompat.matrix.results import Sidecar

NEW = Sidecar(
    "trl1.0.0-tf4.57.6",
    {"trl": "1.0.0", "transformers": "4.57.6"},
    "tested",
    "now",
    lock={"accelerate": "1.13.0", "trl": "1.0.0"},
    date="2026-04-02",
    seconds=12.5,
)
OLD = dataclasses.replace(
    NEW, id="trl0.9.6-tf4.42.4", pins={"trl": "0.9.6", "transformers": "4.42.4"}, sweep="before", seconds=41.0
)
UNBUILT = Sidecar(
    "trl9.9.9", {"trl": "9.9.9"}, "untestable", "now", reason="there is no version of trl==9.9.9\n| so <b>stop</b>"
)

FINE = Record("grpo-b", "corrected", "single", Verdict.OK, Verdict.OK, {"kept": 6}, 0.25)
PREDICTED = Record("grpo-b", "upstream", "single", Verdict.BROKEN, Verdict.BROKEN, {"text": "<script>x</script>"}, 1.0)
SURPRISE = Record("grpo-a", "upstream", "fsdp1", Verdict.SILENT, Verdict.OK, {"max_abs_error": 0.3})
CRASH = Record("grpo-a", "upstream", "fsdp1-no_shard", Verdict.ERROR, None, {"failure": "a\n\x1b[31mb\x00"})
GONE = Record("grpo-a", "upstream", "zero3", Verdict.ABSENT, Verdict.ABSENT)


@pytest.fixture
def results(tmp_path: Path) -> Callable[..., Path]:
    def write(*cells: tuple[Sidecar, tuple[Record, ...]]) -> Path:
        for sidecar, records in cells:
            (tmp_path / f"{sidecar.id}.cell.json").write_text(sidecar.to_json())
            for record in records:
                append_record(tmp_path / f"{sidecar.id}.jsonl", record)
        return tmp_path

    return write


@pytest.fixture
def report(results: Callable[..., Path]) -> Report:
    return gather(results((NEW, (FINE, PREDICTED, SURPRISE, CRASH, GONE)), (OLD, (FINE,)), (UNBUILT, ())))


def test_cells_are_in_the_order_of_their_versions_and_questions_of_their_kind(report: Report) -> None:
    assert [cell.id for cell in report.cells] == ["trl0.9.6-tf4.42.4", "trl1.0.0-tf4.57.6", "trl9.9.9"]
    assert [(c.issue, c.subject, c.strategy) for c in report.columns] == [
        ("grpo-a", "upstream", "zero3"),
        ("grpo-a", "upstream", "fsdp1"),
        ("grpo-a", "upstream", "fsdp1-no_shard"),
        ("grpo-b", "upstream", "single"),
        ("grpo-b", "corrected", "single"),
    ]
    assert [(subject, len(columns)) for subject, columns in report.groups("grpo-b")] == [
        ("upstream", 1),
        ("corrected", 1),
    ]


def test_the_summary_counts_what_is_wrong_and_what_is_unfinished(report: Report) -> None:
    assert report.summary == "3 cells, 6 verdicts; 2 not as predicted; 1 cell not finished"
    assert Report(report.cells[:1]).summary == "1 cell, 1 verdict; all as predicted"
    assert report.counts == {
        Verdict.OK: 2,
        Verdict.BROKEN: 1,
        Verdict.SILENT: 1,
        Verdict.ERROR: 1,
        Verdict.ABSENT: 1,
        Verdict.UNTESTABLE: 1,
    }


def test_json_has_the_schema_of_the_design(report: Report) -> None:
    document = json.loads(json.dumps(report.to_dict()))
    assert document["schema"] == 1
    old, new, unbuilt = document["cells"]
    assert old == {
        "id": "trl0.9.6-tf4.42.4",
        "pins": {"trl": "0.9.6", "transformers": "4.42.4"},
        "date": "2026-04-02",
        "lock": {"accelerate": "1.13.0", "trl": "1.0.0"},
        "state": "tested",
        "reason": None,
        "seconds": 41.0,
        "verdicts": [
            {
                "issue": "grpo-b",
                "subject": "corrected",
                "strategy": "single",
                "verdict": "ok",
                "expected": "ok",
                "evidence": {"kept": 6},
                "seconds": 0.25,
            }
        ],
    }
    assert [verdict["verdict"] for verdict in new["verdicts"]] == ["ok", "broken", "silent", "error", "absent"]
    assert (unbuilt["state"], unbuilt["verdicts"]) == ("untestable", [])


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


def test_junit_fails_only_what_is_not_as_predicted(report: Report) -> None:
    root = ElementTree.fromstring(junit.junit(report).encode())
    counts = {
        suite.get("name"): [int(suite.get(name, "")) for name in ("tests", "failures", "errors", "skipped")]
        for suite in root
    }
    assert counts == {
        "trl0.9.6-tf4.42.4": [1, 0, 0, 0],
        "trl1.0.0-tf4.57.6": [5, 2, 0, 1],
        "trl9.9.9": [1, 0, 1, 0],
    }
    failures = {
        (case.get("classname"), case.get("name"), failure.get("message"))
        for case in root.iter("testcase")
        for failure in case.iter("failure")
    }
    assert failures == {
        ("trl1.0.0-tf4.57.6.grpo-a", "upstream[fsdp1]", "silent, predicted ok"),
        ("trl1.0.0-tf4.57.6.grpo-a", "upstream[fsdp1-no_shard]", "error, predicted nothing"),
    }
    (error,) = root.iter("error")
    assert (error.get("type"), (error.get("message") or "").split("\n")[0]) == (
        "untestable",
        "there is no version of trl==9.9.9",
    )
    outputs = [output.text or "" for output in root.iter("system-out")]
    assert json.loads(outputs[0]) == {"verdict": "ok", "evidence": {"kept": 6}}
    packages = [(item.get("name"), item.get("value")) for item in root.iter("property")]
    assert ("accelerate", "1.13.0") in packages


def test_junit_survives_what_xml_cannot_hold(report: Report) -> None:
    unbuilt = dataclasses.replace(UNBUILT, reason="\x1b[31mred\x00 \ud800")
    report = Report(tuple(dataclasses.replace(cell, sidecar=unbuilt) for cell in report.cells[2:]))
    (error,) = ElementTree.fromstring(junit.junit(report).encode()).iter("error")
    assert error.get("message") == "\ufffd[31mred\ufffd \ufffd"


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


def test_the_program_writes_all_forms_and_shows_the_cells_of_one_sweep(
    report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "--sweep", "now"]) == 0
    output = capsys.readouterr().out
    assert "trl1.0.0-tf4.57.6" in output
    assert "trl0.9.6" not in output
    assert json.loads((tmp_path / "compat.json").read_text()) == report.to_dict()
    assert "trl0.9.6" in (tmp_path / "compat.html").read_text()
    assert {path.name for path in tmp_path.glob("compat.*")} == {
        "compat.json",
        "compat.md",
        "compat.html",
        "compat.xml",
    }


def test_the_report_is_the_same_whenever_it_is_made(report: Report, tmp_path: Path) -> None:
    first = {path.name: path.read_text() for path in write_all(report, tmp_path)}
    assert {path.name: path.read_text() for path in write_all(gather(tmp_path), tmp_path)} == first


def test_a_prediction_corrected_after_the_sweep_counts(results: Callable[..., Path]) -> None:
    lock = {"trl": "0.15.2", "transformers": "4.48.3"}
    cell = dataclasses.replace(NEW, id="trl0.15.2-tf4.48.3", pins=lock, lock=lock)
    unforeseen = Record("grpo-logits-to-keep", "upstream", "single", Verdict.WASTEFUL, Verdict.OK)
    nobodys = Record("of-another-catalogue", "upstream", "single", Verdict.OK, Verdict.SILENT)
    report = gather(results((cell, (unforeseen, nobodys))))
    assert [record.issue for _, record in report.wrong] == ["grpo-logits-to-keep", "of-another-catalogue"]
    judged = report.judged_by(known_issues.load())
    assert [record.issue for _, record in judged.wrong] == ["of-another-catalogue"]
    assert judged.cells[0].verdicts[0].expected is Verdict.WASTEFUL

    assert main([str(results())]) == 0
    written = json.loads((results() / "compat.json").read_text())
    assert [verdict["expected"] for verdict in written["cells"][0]["verdicts"]] == ["wasteful", "silent"]


def test_failures_are_attributed_by_the_catalogue_as_it_is_now(results: Callable[..., Path]) -> None:
    """An ``error`` that is now explained is ``blocked``; what its named issue no longer stops is an ``error`` again."""
    pins = {"trl": "0.14.0", "transformers": "4.52.4", "accelerate": "1.7.0", "deepspeed": "0.16.9"}
    cell = Sidecar("trl0.14.0-tf4.52.4", pins, "tested", "s")
    text = "AttributeError: 'list' object has no attribute 'get'"
    then_unknown = Record("grpo-eval-metrics", "upstream", "single", Verdict.ERROR, None, {"failures": {"train": text}})
    hidden = {"blocked_by": "grpo-evaluate", "symptoms_of": ["grpo-evaluate"], "failures": {"train": "ValueError: new"}}
    then_known = Record("grpo-eval-accumulation", "upstream", "single", Verdict.BLOCKED, Verdict.BLOCKED, hidden)
    judged = gather(results((cell, (then_unknown, then_known)))).judged_by(known_issues.load())
    first, second = judged.cells[0].verdicts
    assert (first.verdict, first.blocked_by, first.as_predicted) == (Verdict.BLOCKED, "grpo-evaluate", True)
    assert (second.verdict, second.expected, second.as_predicted) == (Verdict.ERROR, Verdict.BLOCKED, False)
    assert second.evidence == {"failures": {"train": "ValueError: new"}}


def test_an_empty_folder_says_what_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"{tmp_path}: no cell has left results there; run one with: nox -s matrix\n"


def test_verdicts_of_an_untestable_cell_are_not_shown(results: Callable[..., Path]) -> None:
    folder = results((UNBUILT, (FINE,)))
    with pytest.raises(MatrixError):
        gather(folder / "nowhere")
    (cell,) = gather(folder).cells
    assert cell.verdicts == ()


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


def test_boundaries_that_no_cell_has_measured_are_listed(report: Report) -> None:
    line = "grpo-a, upstream, fsdp1: broken becomes ok at trl >=0.18 | with accelerate <1.6"
    shown = dataclasses.replace(report, unmeasured=(line,))
    assert shown.to_dict()["unmeasured"] == [line]
    assert "unmeasured" not in report.to_dict()
    markdown = pages.markdown(shown).splitlines()
    assert markdown[markdown.index("## Boundaries that no cell has measured") + 4] == (
        "- grpo-a, upstream, fsdp1: broken becomes ok at trl >=0.18 \\| with accelerate &lt;1.6"
    )
    html = explorer.html(shown)
    assert "<li>grpo-a, upstream, fsdp1: broken becomes ok at trl &gt;=0.18 | with accelerate &lt;1.6</li>" in html
    file = io.StringIO()
    terminal.show_tables(shown, file=file)
    assert "1 boundary of the catalogue was measured by no cell" in file.getvalue()
    for page in (pages.markdown(report), explorer.html(report)):
        assert "Boundaries that no cell has measured" not in page


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
        "0 cells, 0 verdicts; all as predicted",
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
