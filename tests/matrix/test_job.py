"""A cell as a job: what it leaves behind, and how it reports failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from pytest_trlcompat._provenance import of_environment
from pytest_trlcompat.catalog.verdict import Record, Verdict, append_record
from pytest_trlcompat.matrix import job as job_module
from pytest_trlcompat.matrix.cells import Cell
from pytest_trlcompat.matrix.environments import Environment
from pytest_trlcompat.matrix.errors import Untestable
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.matrix.results import Outcome, Sidecar
from pytest_trlcompat.matrix.suite_run import code_digest

from .made_up import BROKEN, CELL, CRASH, OK, SURPRISE, Stage


def test_a_tested_cell_leaves_its_verdicts_and_a_sidecar(stage: Stage) -> None:
    stage.play(OK, BROKEN)
    outcome = stage.run()
    assert (outcome.records, outcome.wrong, outcome.problem) == ((OK, BROKEN), [], None)
    raw = json.loads(stage.results.with_name(f"{CELL.id}.cell.json").read_text())
    assert raw.pop("seconds") < 10
    assert len(raw.pop("digest")) == 16
    assert raw.pop("provenance") == f"{code_digest(Layout(stage.root))}.{of_environment(stage.root / 'env')}"
    assert raw == {
        "schema": 1,
        "id": "trl0.15.2-tf4.48.3",
        "pins": {"trl": "0.15.2", "transformers": "4.48.3", "torch": "2.13.0"},
        "state": "tested",
        "sweep": "first",
        "lock": {"torch": "2.13.0", "trl": "0.15.2"},
        "date": "2025-02-28",
        "reason": None,
        "issues": [],
        "python": None,
    }


@pytest.mark.parametrize(
    "code, packages, why",
    [
        ("0" * 12, "", "with other code"),
        ("", "0" * 12, "with other packages"),
        ("0" * 12, "0" * 12, "with other code and"),
    ],
)
def test_verdicts_of_other_code_or_other_packages_are_none_of_this_run(
    stage: Stage, code: str, packages: str, why: str
) -> None:
    own = f"{code or code_digest(Layout(stage.root))}.{packages or of_environment(stage.root / 'env')}"
    stage.play(OK, BROKEN, provenance=own)
    problem = stage.run().problem
    assert problem is not None
    assert "2 of 2 verdicts are not of this run: issue-a corrected single was measured " + why in problem
    assert stage.sidecar.state == "interrupted"


def test_an_interrupted_cell_whose_environment_has_changed_starts_again(stage: Stage) -> None:
    stage.play(OK, status=2)
    assert stage.run("first").sidecar.state == "interrupted"
    site_packages = stage.root / "env" / "lib" / "python3.11" / "site-packages"
    (site_packages / "trl-0.15.1.dist-info").mkdir(parents=True)
    (site_packages / "trl-0.15.1.dist-info" / "METADATA").write_text("Name: trl\nVersion: 0.15.1\n")
    stage.play(BROKEN)
    outcome = stage.run("second")
    assert outcome.records == (BROKEN,)
    assert "--trlcompat-resume" not in stage.calls[-1]["arguments"]
    assert any("what its verdicts depend on has changed; starts again" in line for line in stage.said)


def test_a_sidecar_that_says_nothing_of_its_packages_is_not_gone_on_with(stage: Stage) -> None:
    stage.play(OK, status=2)
    stage.run("first")
    path = stage.results.with_name(f"{CELL.id}.cell.json")
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in raw.items() if name != "provenance"}))
    stage.play(BROKEN)
    assert stage.run("second").records == (BROKEN,)


def test_pytest_runs_the_suites_with_our_plugin_and_nothing_of_the_callers(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers = {"PYTEST_ADDOPTS": "-x", "PYTHONPATH": "/p", "HOME": "/home/me"}
    for name, value in callers.items():
        monkeypatch.setenv(name, value)
    stage.play(OK)
    stage.run(issues=["issue-b", "issue-a"], pytest_arguments=["-x"])
    (call,) = stage.calls
    assert call["arguments"] == [
        *("-m", "pytest", "-p", "trlcompat", "-p", "no:cacheprovider"),
        *("--trlcompat-results", str(stage.results)),
        *("--trlcompat-issue", "issue-a", "--trlcompat-issue", "issue-b"),
        *(str(stage.root / "suites"), "-x"),
    ]
    environ = call["environ"]
    assert not {"PYTEST_ADDOPTS", "PYTHONPATH"} & set(environ)
    assert (environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"], environ["HF_HUB_OFFLINE"]) == ("1", "1")
    assert environ["TORCH_EXTENSIONS_DIR"] == str(stage.root / "env" / "torch_extensions")
    assert environ["HOME"] == "/home/me"
    assert environ.get("GLIBC_TUNABLES") == os.environ.get("GLIBC_TUNABLES")  # nothing that is measured is tuned


def test_wrong_predictions_and_unpredicted_failures_fail_the_cell_by_name(stage: Stage) -> None:
    stage.play(OK, SURPRISE, CRASH, status=1)
    outcome = stage.run()
    assert outcome.sidecar.state == "tested"
    assert outcome.problem == (
        "trl0.15.2-tf4.48.3: 2 of 3 verdicts are not as predicted: "
        "issue-a upstream ddp is ok, predicted broken; issue-b upstream ddp is error"
    )


def test_many_wrong_predictions_are_not_all_named() -> None:
    records = tuple(Record("i", "upstream", f"s{n}", Verdict.ERROR) for n in range(5))
    problem = Outcome(Sidecar("c", {}, "tested", "s"), records, 1).problem
    assert problem == (
        "c: 5 of 5 verdicts are not as predicted: i upstream s0 is error; i upstream s1 is error; "
        "i upstream s2 is error; and 2 more"
    )


@pytest.mark.parametrize(
    "records, status, state, problem",
    [
        (
            (OK,),
            1,
            "interrupted",
            "trl0.15.2-tf4.48.3 was not finished: pytest failed although all verdicts are as predicted, "
            "so some are missing; see its output",
        ),
        (
            (),
            1,
            "interrupted",
            "trl0.15.2-tf4.48.3 was not finished: pytest failed before the first verdict; see its output",
        ),
        (
            (OK,),
            -9,
            "interrupted",
            "trl0.15.2-tf4.48.3 was not finished: pytest was killed by signal 9",
        ),
        ((), 0, "tested", "trl0.15.2-tf4.48.3: no suite gave a verdict"),
        (
            (),
            5,
            "interrupted",
            "trl0.15.2-tf4.48.3 was not finished: pytest collected no suite; is the name of the issue correct?",
        ),
        (
            (OK,),
            4,
            "interrupted",
            "trl0.15.2-tf4.48.3 was not finished: pytest ended with exit status 4; see its output",
        ),
    ],
)
def test_any_other_failure_of_pytest_fails_the_cell(
    stage: Stage, records: tuple[Record, ...], status: int, state: str, problem: str
) -> None:
    stage.play(*records, status=status)
    outcome = stage.run()
    assert (outcome.sidecar.state, outcome.problem) == (state, problem)


def test_a_cell_that_cannot_be_resolved_is_untestable_with_the_reason(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> Lock:
        raise Untestable("there is no version of trl==9.9.9")

    monkeypatch.setattr(job_module, "lock_for", refuse)
    outcome = stage.run()
    assert (outcome.sidecar.state, outcome.records, stage.calls) == ("untestable", (), [])
    assert outcome.problem == "trl0.15.2-tf4.48.3 is untestable: there is no version of trl==9.9.9"
    assert stage.sidecar.reason == "there is no version of trl==9.9.9"


def test_processes_that_run_the_same_cell_wait_for_each_other(stage: Stage) -> None:
    append_record(stage.results, OK)  # makes the folder
    stage.play(OK)
    lock = stage.results.with_name(f".{CELL.id}.lock")
    holder = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, 2); print(1, flush=True); time.sleep(1)"
    )
    with subprocess.Popen([sys.executable, "-c", holder, str(lock)], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.readline()
        stage.run()
        assert running.wait() == 0
    assert stage.said == ["trl0.15.2-tf4.48.3: another process is running it; waiting"]


def test_modules_are_shared_after_pytest(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[int] = []
    monkeypatch.setattr(Environment, "share_modules", lambda environment: shared.append(len(stage.calls)))
    stage.play(OK)
    stage.run()
    assert shared == [1]


def test_a_damaged_lock_of_a_later_cell_does_not_stop_this_one(stage: Stage) -> None:
    following = Cell({"trl": "0.2.0"})
    stage.results.parent.mkdir(parents=True)
    stage.results.with_name(f"{following.id}.cell.json").write_text("torn")
    stage.play(OK)
    assert stage.run(following=[following]).problem is None
