"""How a cell and a sweep continue after an interruption, and when they start again."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.matrix import disk
from pytest_trlcompat.matrix import job as job_module
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.environments import Environment
from pytest_trlcompat.matrix.errors import DiskFull, MatrixError
from pytest_trlcompat.matrix.job import run_cell
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.matrix.sweep import Sweep

from .made_up import BROKEN, CELL, LOCK, MATRIX, OK, SURPRISE, Stage, make_stage, records_in

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.matrix import made_up
from pytest_trlcompat.matrix import job as job_module
from pytest_trlcompat.matrix.environments import Environment

class Said(list):
    def append(self, text):
        print(text, flush=True)

folder = Path({folder!r})
job_module.lock_for = lambda matrix, cell, layout: made_up.LOCK
job_module.disk.free_space = lambda *arguments: None
job_module.ensure = lambda lock, layout, say: Environment(folder / "env")
try:
    made_up.Stage(folder, Said()).run("interrupted")
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_the_next_run_adds_missing_verdicts(stage: Stage) -> None:
    stage.play(OK, status=1)
    stage.run()
    stage.play(BROKEN)
    outcome = stage.run("next")
    assert (outcome.records, outcome.problem) == ((OK, BROKEN), None)
    assert "--trlcompat-resume" in stage.calls[-1]["arguments"]


def test_a_killed_cell_continues_after_its_last_complete_verdict(stage: Stage) -> None:
    stage.cut_short("killed", OK, torn='{"issue": "issue-a", "subj')
    stage.play(BROKEN)
    outcome = stage.run("next")
    assert outcome.records == (OK, BROKEN)
    assert outcome.problem is None
    assert "--trlcompat-resume" in stage.calls[-1]["arguments"]
    assert records_in(stage.calls[-1]["before"]) == [OK]
    assert stage.said == ["trl0.15.2-tf4.48.3: continues after 1 finished verdict"]
    assert 100 <= outcome.sidecar.seconds < 110  # both runs


@pytest.mark.parametrize("changed", ["suites/test_a.py", "pytest_trlcompat/plugin/judging.py", "fixtures/zero3.json"])
def test_a_cell_starts_again_if_what_its_verdicts_depend_on_has_changed(stage: Stage, changed: str) -> None:
    stage.cut_short("killed", OK)
    (stage.root / changed).parent.mkdir(exist_ok=True)
    (stage.root / changed).write_text("# changed")
    stage.play(BROKEN)
    assert stage.run("next").records == (BROKEN,)
    assert "--trlcompat-resume" not in stage.calls[-1]["arguments"]
    assert stage.said == [
        "trl0.15.2-tf4.48.3: was interrupted, but what its verdicts depend on has changed; starts again"
    ]


def test_a_cell_continues_if_something_else_has_changed(stage: Stage) -> None:
    stage.cut_short("killed", OK)
    (stage.root / "pytest_trlcompat" / "matrix").mkdir()
    (stage.root / "pytest_trlcompat" / "matrix" / "report.py").write_text("# changed")
    (stage.root / "fixtures" / "matrix.toml").write_text("# changed")
    (stage.root / "fixtures" / "evidence.json").write_text("published from the last sweep")
    stage.play(BROKEN)
    assert stage.run("next").records == (OK, BROKEN)


@pytest.mark.parametrize("options", [{"fresh": True}, {"issues": ["issue-a"]}], ids=["fresh", "issues"])
def test_a_killed_cell_starts_again_with_fresh_or_other_options(stage: Stage, options: Mapping[str, Any]) -> None:
    stage.cut_short("killed", OK)
    stage.play(BROKEN)
    assert stage.run("next", **options).records == (BROKEN,)


def test_a_cell_that_a_killed_sweep_finished_is_reused(stage: Stage) -> None:
    stage.play(OK)
    stage.run("killed")  # the command never came to its end
    outcome = stage.run("next")
    assert len(stage.calls) == 1
    assert (outcome.records, outcome.problem, outcome.sidecar.sweep) == ((OK,), None, "next")
    assert stage.said == [
        "trl0.15.2-tf4.48.3: finished in an interrupted sweep; its verdicts are reused (not with '-- --fresh')"
    ]
    stage.run("next but one", fresh=True)
    assert len(stage.calls) == 2


def test_reused_verdicts_that_are_not_as_predicted_still_fail(stage: Stage) -> None:
    stage.play(SURPRISE, status=1)
    stage.run("killed")
    assert "1 of 1 verdicts are not as predicted" in (stage.run("next").problem or "")


def test_after_a_sweep_that_ended_the_next_one_starts_again(stage: Stage) -> None:
    stage.play(OK)
    first = Sweep(Layout(stage.root), {})
    run_cell(MATRIX, CELL, first, say=stage.said.append)
    assert first.has_begun
    first.close()
    stage.play(BROKEN)
    assert stage.run("next").records == (BROKEN,)
    assert len(stage.calls) == 2


def test_a_sweep_with_a_running_cell_does_not_close(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    sweep = Sweep(layout, {})
    sweep.begin_cell("a")
    sweep.close()
    assert sweep.has_begun
    Sweep(layout, {Sweep.VARIABLE: "other"}).end_cell("a")  # by any process
    sweep.close()
    assert not sweep.has_begun


def test_workers_of_one_nox_share_its_sweep(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    outermost = Sweep(Layout(tmp_path), environ)
    worker = Sweep(Layout(tmp_path), environ)
    assert (outermost.outermost, worker.outermost) == (True, False)
    assert outermost.name == worker.name == environ["TRLCOMPAT_SWEEP"]


def test_a_full_disk_is_one_clear_message_and_keeps_what_was_finished(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.cut_short("killed", OK)

    def refuse(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(job_module, "write_whole", refuse)
    with pytest.raises(MatrixError) as caught:
        stage.run("next")
    assert str(caught.value) == (
        f"the disk is full ({stage.results.with_name(CELL.id + '.cell.json')}): free some space and run the same "
        "command again; finished verdicts are kept, and the sweep continues after them"
    )
    monkeypatch.undo()
    assert records_in(stage.results.read_text()) == [OK]


def test_a_cell_is_left_unfinished_if_the_disk_is_full_and_continues_later(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = "the disk is full (while uv wrote to it): free some space and run the same command again"

    def refuse(lock: Lock, layout: Layout, say: object) -> Environment:
        raise DiskFull(full)

    stage.play(OK)
    first = Sweep(Layout(stage.root), {})
    with monkeypatch.context() as patch:
        patch.setattr(job_module, "ensure", refuse)
        outcome = run_cell(MATRIX, CELL, first, say=stage.said.append)
    assert (outcome.sidecar.state, outcome.records) == ("interrupted", ())
    assert outcome.problem == f"trl0.15.2-tf4.48.3 was not finished: {full}"
    assert stage.sidecar.reason == full
    other = Cell({"trl": "0.9.6"})
    assert run_cell(MATRIX, other, first, say=stage.said.append).problem is None  # the sweep goes on
    first.close()
    assert stage.run("next").records == (OK,)
    following = Sweep(Layout(stage.root), {Sweep.VARIABLE: "next"})
    run_cell(MATRIX, other, following, say=stage.said.append)
    assert stage.said == ["trl0.9.6: finished in an interrupted sweep; its verdicts are reused (not with '-- --fresh')"]


def test_disk_space_is_freed_from_finished_cells_that_do_not_run_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[tuple[list[str], list[str]]] = []

    def free_space(lock: Lock, layout: Layout, finished: Sequence[Lock], wanted: Sequence[Lock], say: object) -> None:
        requested.append(([each.cell_id for each in finished], [each.cell_id for each in wanted]))

    def kept(matrix: Matrix, cell: Cell, layout: Layout) -> Lock:
        if cell.id == "trl2":
            raise MatrixError("damaged")
        return dataclasses.replace(LOCK, cell_id=cell.id)

    monkeypatch.setattr(disk, "free_space", free_space)
    monkeypatch.setattr(job_module, "kept", kept)
    stage.play(OK)
    sweep = Sweep(Layout(stage.root), {})
    one, two, three, four = (Cell({"trl": str(number)}) for number in range(1, 5))
    run_cell(MATRIX, one, Sweep(Layout(stage.root), {Sweep.VARIABLE: "another"}), say=stage.said.append)
    run_cell(MATRIX, three, sweep, following=[two, four], say=stage.said.append)
    run_cell(MATRIX, four, sweep, say=stage.said.append)
    assert requested == [([], []), ([], ["trl4"]), (["trl3"], [])]


@pytest.mark.parametrize("file", ["jsonl", "cell.json"])
def test_a_damaged_results_file_is_named(stage: Stage, file: str) -> None:
    stage.cut_short("killed", OK)
    path = stage.results.with_name(f"{CELL.id}.{file}")
    path.write_text("{\n" + path.read_text())
    with pytest.raises(MatrixError, match=rf"{CELL.id}\.{file}.+remove (it|the file) and run the cell again"):
        stage.run("next")


def test_ctrl_c_in_the_middle_keeps_finished_verdicts_and_leaves_no_orphan(tmp_path: Path) -> None:
    stage = make_stage(tmp_path)
    stage.play(OK, seconds=300)
    script = SCRIPT.format(root=str(ROOT), folder=str(tmp_path))
    environ = {name: value for name, value in os.environ.items() if name != "COV_CORE_SOURCE"}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ
    ) as running:
        deadline = time.monotonic() + 30
        while not (stage.results.exists() and stage.results.read_text()):
            assert running.poll() is None, running.stdout and running.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
        output, _ = running.communicate(timeout=20)
    assert running.returncode == 130
    assert "stopped; 1 finished verdict is kept, the same command continues after it" in output
    assert "Traceback" not in output
    assert (stage.sidecar.state, stage.sidecar.reason) == ("interrupted", "it was stopped")
    mark = f"TRLCOMPAT_RUN={stage.calls[0]['environ']['TRLCOMPAT_RUN']}".encode()
    assert [path for path in Path("/proc").glob("[0-9]*/environ") if mark in _read(path)] == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
