"""Publishing: from a sweep's report to the evidence that ships; the pages made from it: test_site.py."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest

from pytest_trlcompat.catalog import evidence, known_issues
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.verdict import Record, Verdict, append_record
from pytest_trlcompat.matrix.environments import Environment
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.report import pages
from pytest_trlcompat.matrix.report.command import main
from pytest_trlcompat.matrix.report.model import Report, gather
from pytest_trlcompat.matrix.report.publish import publish, report_of
from pytest_trlcompat.matrix.results import Sidecar
from pytest_trlcompat.matrix.sessions import Project
from pytest_trlcompat.matrix.sweep import Sweep

LOCK = {
    "accelerate": "1.4.0",
    "aiohttp": "3.11.12",
    "datasets": "3.3.2",
    "deepspeed": "0.16.4",
    "peft": "0.14.0",
    "torch": "2.13.0",
    "transformers": "4.48.3",
    "trl": "0.15.2",
}
OLD = Sidecar("trl0.15.2-tf4.48.3", {"trl": "0.15.2", "transformers": "4.48.3"}, "tested", "s", LOCK, "2025-02-28")
NEW = dataclasses.replace(
    OLD,
    id="trl0.15.2-tf4.49.0",
    pins={"trl": "0.15.2", "transformers": "4.49.0"},
    lock={**LOCK, "transformers": "4.49.0"},
)
UNBUILT = Sidecar("trl9.9.9", {"trl": "9.9.9"}, "untestable", "s", reason="there is no such version")

WASTEFUL = Record("grpo-logits-to-keep", "upstream", "single", Verdict.WASTEFUL, Verdict.WASTEFUL)
CURED = Record("grpo-logits-to-keep", "corrected", "single", Verdict.OK, Verdict.OK)
FINE = dataclasses.replace(WASTEFUL, verdict=Verdict.OK, expected=Verdict.OK)
SURPRISE = dataclasses.replace(WASTEFUL, verdict=Verdict.SILENT)


@pytest.fixture
def checkout(tmp_path: Path) -> Layout:
    """A checkout with the lock of one of two cells."""
    layout = Layout(tmp_path)
    layout.locks.mkdir(parents=True)
    (layout.locks / f"{OLD.id}.txt").write_text("")
    return layout


def sweep(layout: Layout, *cells: tuple[Sidecar, tuple[Record, ...]]) -> Report:
    for sidecar, records in cells:
        path = layout.results / f"{sidecar.id}.cell.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(sidecar.to_json())
        os.utime(path, (1_700_000_000, 1_700_000_000))  # 2023-11-14
        for record in records:
            append_record(layout.results / f"{sidecar.id}.jsonl", record)
    return gather(layout.results)


def test_the_evidence_has_versions_and_verdicts_of_the_measured_cells(checkout: Layout) -> None:
    report = sweep(checkout, (OLD, (WASTEFUL, CURED)), (UNBUILT, ()))
    paths = publish(report, checkout)
    assert paths[:2] == [checkout.evidence, checkout.page]
    assert all(path.is_file() for path in paths)
    found = evidence.load(checkout.evidence)
    assert found.date == "2023-11-14"
    (cell,) = found.cells
    assert cell.id == OLD.id
    assert cell.date == "2025-02-28"
    assert cell.versions == {package: version for package, version in LOCK.items() if package != "aiohttp"}
    assert cell.verdicts == {WASTEFUL.key: Verdict.WASTEFUL, CURED.key: Verdict.OK}


def test_a_sweep_with_a_surprise_or_a_gap_is_not_published(checkout: Layout) -> None:
    report = sweep(checkout, (OLD, (SURPRISE,)))
    with pytest.raises(MatrixError, match="not published: 1 verdicts are not as predicted, .*single is silent"):
        publish(report, checkout)
    cut_short = dataclasses.replace(OLD, state="interrupted")
    with pytest.raises(MatrixError, match=f"not published: {OLD.id} was not finished; run it again"):
        publish(sweep(checkout, (cut_short, (WASTEFUL,))), checkout)
    assert not checkout.evidence.exists()
    assert not checkout.page.exists()


def test_the_program_publishes_when_asked(checkout: Layout, capsys: pytest.CaptureFixture[str]) -> None:
    sweep(checkout, (OLD, (WASTEFUL, CURED)))
    assert main([str(checkout.results)]) == 0
    assert not checkout.evidence.exists()
    assert main([str(checkout.results), "--publish", str(checkout.root)]) == 0
    assert capsys.readouterr().out.splitlines()[-4:] == [
        f"published: {checkout.evidence}",
        f"published: {checkout.page}",
        f"published: {len(known_issues.load()) + 1} files in {checkout.issues}",
        f"published: {checkout.explorer}",
    ]
    assert checkout.evidence.is_file()
    assert checkout.page.is_file()


def test_pages_say_so_where_no_release_has_cured_an_issue(checkout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    report = sweep(checkout, (OLD, (WASTEFUL,)))
    known = known_issues.load()["grpo-logits-to-keep"]
    broken = tuple(each for each in known.predictions if each.verdict is not Verdict.OK)
    for issue, text in (
        (known, "Needs no cure from trl 0.15 with transformers 4.49, trl 0.20 (single-neither)."),
        (dataclasses.replace(known, predictions=broken), "No release has cured it."),
    ):
        monkeypatch.setattr(known_issues, "load", lambda issue=issue: Catalog({issue.id: issue}))
        assert text in pages.markdown(report)


@pytest.mark.parametrize(
    ("arguments", "rest"),
    [
        ([], []),
        (["--publish"], ["--publish", "{root}"]),
        (["--publish", "--sweep", "now"], ["--sweep", "now", "--publish", "{root}"]),
        (["--pages"], ["--pages", "{root}"]),
        (["--tables"], ["--tables"]),
    ],
)
def test_the_session_publishes_into_its_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], rest: list[str]
) -> None:
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv(Sweep.VARIABLE, "another")  # not the outermost nox, which would print a table at exit
    project = Project(root)
    monkeypatch.setattr(project.environments, "tools", lambda name, requirements: Environment(tmp_path))
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    project.report(arguments)
    (command,) = commands
    assert command[3:6] == [str(root / "build" / "compat"), "--history", str(root)]
    assert command[6:] == [*(word.format(root=root) for word in rest)]


@pytest.mark.parametrize(("after", "more"), [([], []), (["--full", "--tables"], ["--tables"])])
def test_a_sweep_ends_in_a_summary_or_in_tables_where_they_were_requested(
    checkout: Layout, monkeypatch: pytest.MonkeyPatch, after: list[str], more: list[str]
) -> None:
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv(Sweep.VARIABLE, "another")
    project = Project(root)
    project.sweep = Sweep(checkout, {Sweep.VARIABLE: "now"})
    project.cells(["-s", "matrix", "--", *after])
    reports: list[list[str]] = []
    monkeypatch.setattr(project, "report", reports.append)
    project.end()
    assert reports == [], "no cell was run"
    project.sweep.begin_cell(OLD.id)
    project.sweep.end_cell(OLD.id)
    project.end()
    assert reports == [["--sweep", "now", *more]]


def test_the_report_lists_the_boundaries_that_its_cells_leave_open(checkout: Layout) -> None:
    sweep(checkout, (OLD, (WASTEFUL,)), (NEW, (FINE,)))
    main([str(checkout.results)])
    unmeasured = json.loads((checkout.results / "compat.json").read_text())["unmeasured"]
    assert len(unmeasured) >= 3
    assert any("silent becomes ok at trl >=0.15 with transformers >=4.52: not measured below" in x for x in unmeasured)
    assert not any("upstream, single: wasteful becomes ok" in line for line in unmeasured)


def test_a_sweep_of_some_cells_is_published_beside_what_was(checkout: Layout) -> None:
    publish(sweep(checkout, (OLD, (WASTEFUL, CURED)), (NEW, (FINE, CURED))), checkout)
    for path in checkout.results.glob("*"):
        path.unlink()
    other = dataclasses.replace(OLD, id=f"{OLD.id}-torch2.6.0", lock={**LOCK, "torch": "2.6.0"})
    report = sweep(checkout, (NEW, (FINE,)), (other, (WASTEFUL, CURED)))
    publish(report, checkout, keep=True)
    found = {cell.id: cell for cell in evidence.load(checkout.evidence).cells}
    assert list(found) == [other.id, OLD.id, NEW.id]
    assert [found[name].versions["torch"] for name in found] == ["2.6.0", "2.13.0", "2.13.0"]
    assert found[OLD.id].verdicts == {WASTEFUL.key: Verdict.WASTEFUL, CURED.key: Verdict.OK}
    assert found[NEW.id].verdicts == {FINE.key: Verdict.OK, CURED.key: Verdict.OK}, "one of them run anew"
    publish(report, checkout)
    assert [cell.id for cell in evidence.load(checkout.evidence).cells] == [other.id, NEW.id]


def measured_with(code: str, packages: str, *records: Record) -> tuple[Record, ...]:
    return tuple(dataclasses.replace(record, provenance=f"{code * 12}.{packages * 12}") for record in records)


def test_kept_verdicts_of_other_code_say_with_which_and_of_which_day(checkout: Layout) -> None:
    publish(sweep(checkout, (NEW, measured_with("a", "b", FINE, CURED))), checkout)
    for path in checkout.results.glob("*"):
        path.unlink()
    report = sweep(checkout, (NEW, measured_with("c", "b", FINE)))
    os.utime(checkout.results / f"{NEW.id}.cell.json", (1_700_100_000, 1_700_100_000))  # 2023-11-16
    publish(report, checkout, keep=True)
    (cell,) = evidence.load(checkout.evidence).cells
    assert cell.origin_of(FINE.key) == (f"{'c' * 12}.{'b' * 12}", "2023-11-16")
    assert cell.origin_of(CURED.key) == (f"{'a' * 12}.{'b' * 12}", "2023-11-14")


def test_kept_verdicts_of_which_nobody_wrote_it_down_are_not_taken_for_this_sweeps(checkout: Layout) -> None:
    publish(sweep(checkout, (NEW, (FINE, CURED))), checkout)
    assert "measured" not in checkout.evidence.read_text().splitlines()[1]
    for path in checkout.results.glob("*"):
        path.unlink()
    publish(sweep(checkout, (NEW, measured_with("c", "b", FINE))), checkout, keep=True)
    (cell,) = evidence.load(checkout.evidence).cells
    assert cell.origin_of(FINE.key) == (f"{'c' * 12}.{'b' * 12}", "2023-11-14")
    assert cell.origin_of(CURED.key) == ("", "2023-11-14")


def test_verdicts_of_other_packages_are_not_kept_beside_new_ones(checkout: Layout) -> None:
    publish(sweep(checkout, (NEW, measured_with("a", "b", FINE, CURED))), checkout)
    for path in checkout.results.glob("*"):
        path.unlink()
    with pytest.raises(MatrixError, match=f"of {NEW.id} 1 verdicts would be kept that were measured with other packa"):
        publish(sweep(checkout, (NEW, measured_with("a", "d", FINE))), checkout, keep=True)


def test_a_cell_that_was_measured_with_two_codes_is_not_published(checkout: Layout) -> None:
    mixed = (*measured_with("a", "b", WASTEFUL), *measured_with("c", "b", CURED))
    with pytest.raises(MatrixError) as raised:
        publish(sweep(checkout, (OLD, mixed)), checkout)
    assert str(raised.value) == (
        f"not published: {OLD.id} has verdicts of different code or packages; run it again first, with: -- --fresh"
    )
    for path in checkout.results.glob("*"):
        path.unlink()
    run = dataclasses.replace(OLD, provenance=f"{'e' * 12}.{'b' * 12}")
    with pytest.raises(MatrixError, match="has verdicts that were measured with other code than its run"):
        publish(sweep(checkout, (run, measured_with("a", "b", WASTEFUL))), checkout)
    assert not checkout.evidence.exists()


def test_a_sweep_of_which_nothing_was_measured_is_not_published(checkout: Layout) -> None:
    with pytest.raises(MatrixError, match="not published: no cells were due, so that nothing was shown"):
        publish(sweep(checkout, (UNBUILT, ())), checkout)
    assert not checkout.evidence.exists()


def test_of_a_cell_with_other_versions_nothing_is_kept(checkout: Layout) -> None:
    older = dataclasses.replace(NEW, lock={**NEW.lock, "accelerate": "1.3.0"})
    publish(sweep(checkout, (older, (FINE, CURED))), checkout)
    (checkout.results / f"{NEW.id}.jsonl").unlink()
    publish(sweep(checkout, (NEW, (FINE,))), checkout, keep=True)
    (found,) = evidence.load(checkout.evidence).cells
    assert (found.versions["accelerate"], found.verdicts) == ("1.4.0", {FINE.key: Verdict.OK})


def test_what_is_kept_is_held_against_the_catalogue_as_it_is_now(checkout: Layout) -> None:
    publish(sweep(checkout, (OLD, (WASTEFUL, CURED))), checkout)
    text = checkout.evidence.read_text()
    checkout.evidence.write_text(text.replace('"wasteful"', '"silent"'))
    report = sweep(checkout, (NEW, (FINE, CURED)))
    for path in checkout.results.glob(f"{OLD.id}.*"):
        path.unlink()
    with pytest.raises(MatrixError, match=f"not published: 1 verdicts are not as predicted, .* {OLD.id}: .* is silent"):
        publish(gather(checkout.results), checkout, keep=True)
    assert len(report.cells) == 2


def test_nothing_to_keep(checkout: Layout) -> None:
    with pytest.raises(MatrixError, match=r"nothing was published yet: .*evidence\.json"):
        publish(sweep(checkout, (NEW, (FINE,))), checkout, keep=True)


def test_what_a_conformance_suite_explained_or_could_not_try_can_be_published_again(checkout: Layout) -> None:
    explained = {"differing": ["loss"], "blocked_by": "dpo-shifted-weights"}
    found = (
        Record("conformance-dpo", "upstream", "single-hinge", Verdict.BLOCKED, Verdict.OK, explained),
        Record("conformance-dpo", "upstream", "single-ipo", Verdict.ABSENT, Verdict.OK, {"not_in_this_release": ["x"]}),
    )
    publish(sweep(checkout, (OLD, found)), checkout)
    first = checkout.evidence.read_text()
    publish(Report(()), checkout, keep=True)
    assert checkout.evidence.read_text() == first
    for verdict in ("blocked by dpo-shifted-weights", "absent"):
        checkout.evidence.write_text(first.replace(f"{verdict} (fits)", verdict))
        with pytest.raises(MatrixError, match=f"conformance-dpo upstream .* is {verdict.split()[0]}"):
            publish(Report(()), checkout, keep=True)


STOPPED = Record("grpo-logits-to-keep", "upstream", "single", Verdict.ERROR, None)
LATER = Sidecar("trl0.15.2-tf4.52.4", {"trl": "0.15.2", "transformers": "4.52.4"}, "tested", "s", LOCK, "2025-05-30")


@pytest.mark.parametrize("schema", [1, 2, 3])
def test_an_error_counts_as_blocked_only_where_failures_were_not_attributed_yet(checkout: Layout, schema: int) -> None:
    stack = {"trl": "0.15.2", "transformers": "4.52.4"}
    verdicts = {STOPPED.issue: {STOPPED.subject: {STOPPED.strategy: "error"}}}
    before = {"id": LATER.id, "date": LATER.date, "stack": stack, "verdicts": verdicts}
    checkout.evidence.write_text(json.dumps({"schema": schema, "date": "2025-06-01", "torch": [], "cells": [before]}))
    report = sweep(checkout, (OLD, (WASTEFUL, CURED)))
    if schema > 1:
        with pytest.raises(MatrixError, match="grpo-logits-to-keep upstream single is error"):
            publish(report, checkout, keep=True)
        return
    publish(report, checkout, keep=True)
    found = {cell.id: cell for cell in evidence.load(checkout.evidence).cells}
    assert [found[cell].attributed for cell in (LATER.id, OLD.id)] == [False, True]
    assert found[LATER.id].verdicts == {STOPPED.key: Verdict.ERROR}
    assert found[LATER.id].gave(STOPPED.key, Verdict.BLOCKED)


def test_published_evidence_says_who_blocked_and_a_wrong_one_is_not_published(checkout: Layout) -> None:
    stack = {**LOCK, "trl": "0.14.0", "transformers": "4.52.4", "deepspeed": "0.16.9"}
    cell = Sidecar(
        "trl0.14.0-tf4.52.4", {"trl": "0.14.0", "transformers": "4.52.4"}, "tested", "s", stack, "2025-05-30"
    )
    blocked = Record("grpo-eval-metrics", "upstream", "single", Verdict.BLOCKED, Verdict.BLOCKED)
    blocked = dataclasses.replace(blocked, evidence={"blocked_by": "grpo-evaluate"})
    publish(sweep(checkout, (cell, (blocked,))), checkout)
    text = checkout.evidence.read_text()
    assert '"single": "blocked by grpo-evaluate"' in text
    (record,) = report_of(evidence.load(checkout.evidence)).cells[0].verdicts
    assert (record.blocked_by, record.as_predicted) == ("grpo-evaluate", True)
    checkout.evidence.write_text(text.replace("blocked by grpo-evaluate", "blocked by grpo-train-sampler"))
    (wrong,) = report_of(evidence.load(checkout.evidence)).cells[0].verdicts
    assert (wrong.blocked_by, wrong.as_predicted) == ("grpo-train-sampler", False)
