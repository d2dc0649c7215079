"""What a cell and a sweep go on with after they were cut short, and what they start afresh."""

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
from pytest_trlcompat.matrix import job as room
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.environments import Environment
from pytest_trlcompat.matrix.errors import DiskFull, MatrixError
from pytest_trlcompat.matrix.job import run_cell
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.matrix.sweep import Sweep

from .made_up import BROKEN, CELL, LOCK, MATRIX, OK, SURPRISE, Stage, make_stage

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.matrix import made_up
from pytest_trlcompat.matrix import job as room
from pytest_trlcompat.matrix.environments import Environment

class Said(list):
    def append(self, text):
        print(text, flush=True)

folder = Path({folder!r})
room.lock_for = lambda matrix, cell, layout: made_up.LOCK
room.disk.make_room = lambda *arguments: None
room.ensure = lambda lock, layout, say: Environment(folder / "env")
try:
    made_up.Stage(folder, Said()).run("interrupted")
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_missing_verdicts_are_fetched_by_the_next_run(stage: Stage) -> None:
    stage.play(OK, status=1)
    stage.run()
    stage.play(BROKEN)
    outcome = stage.run("next")
    assert (outcome.records, outcome.problem) == ((OK, BROKEN), None)
    assert "--trlcompat-resume" in stage.calls[-1]["arguments"]


def test_a_killed_cell_goes_on_after_its_last_whole_verdict(stage: Stage) -> None:
    stage.cut_short("killed", OK, torn='{"issue": "issue-a", "subj')
    stage.play(BROKEN)
    outcome = stage.run("next")
    assert outcome.records == (OK, BROKEN)
    assert outcome.problem is None
    assert "--trlcompat-resume" in stage.calls[-1]["arguments"]
    assert stage.calls[-1]["before"] == OK.to_json() + "\n"
    assert stage.said == ["trl0.15.2-tf4.48.3: goes on after 1 finished verdict"]
    assert 100 <= outcome.sidecar.seconds < 110  # both runs


@pytest.mark.parametrize("changed", ["suites/test_a.py", "pytest_trlcompat/plugin/judging.py", "fixtures/zero3.json"])
def test_what_verdicts_depend_on_has_changed_so_it_starts_afresh(stage: Stage, changed: str) -> None:
    stage.cut_short("killed", OK)
    (stage.root / changed).parent.mkdir(exist_ok=True)
    (stage.root / changed).write_text("# changed")
    stage.play(BROKEN)
    assert stage.run("next").records == (BROKEN,)
    assert "--trlcompat-resume" not in stage.calls[-1]["arguments"]
    assert stage.said == ["trl0.15.2-tf4.48.3: was cut short, and what it depends on has changed since; starts afresh"]


def test_what_verdicts_do_not_depend_on_may_change(stage: Stage) -> None:
    stage.cut_short("killed", OK)
    (stage.root / "pytest_trlcompat" / "matrix").mkdir()
    (stage.root / "pytest_trlcompat" / "matrix" / "report.py").write_text("# changed")
    (stage.root / "fixtures" / "matrix.toml").write_text("# changed")
    (stage.root / "fixtures" / "evidence.json").write_text("published from the last sweep")
    stage.play(BROKEN)
    assert stage.run("next").records == (OK, BROKEN)


@pytest.mark.parametrize("options", [{"fresh": True}, {"issues": ["issue-a"]}], ids=["fresh", "issues"])
def test_a_killed_cell_starts_afresh_when_told_or_asked_otherwise(stage: Stage, options: Mapping[str, Any]) -> None:
    stage.cut_short("killed", OK)
    stage.play(BROKEN)
    assert stage.run("next", **options).records == (BROKEN,)


def test_a_cell_that_a_killed_sweep_finished_is_taken_over(stage: Stage) -> None:
    stage.play(OK)
    stage.run("killed")  # the command never came to its end
    outcome = stage.run("next")
    assert len(stage.calls) == 1
    assert (outcome.records, outcome.problem, outcome.sidecar.sweep) == ((OK,), None, "next")
    assert stage.said == [
        "trl0.15.2-tf4.48.3: finished in a sweep that was cut short; taken over ('-- --fresh' runs it again)"
    ]
    stage.run("next but one", fresh=True)
    assert len(stage.calls) == 2


def test_what_was_taken_over_keeps_its_wrong_predictions(stage: Stage) -> None:
    stage.play(SURPRISE, status=1)
    stage.run("killed")
    assert "1 of 1 verdicts are not as predicted" in (stage.run("next").problem or "")


def test_a_sweep_that_came_to_its_end_starts_afresh_the_next_time(stage: Stage) -> None:
    stage.play(OK)
    first = Sweep(Layout(stage.root), {})
    run_cell(MATRIX, CELL, first, say=stage.said.append)
    assert first.began
    first.close()
    stage.play(BROKEN)
    assert stage.run("next").records == (BROKEN,)
    assert len(stage.calls) == 2


def test_a_sweep_with_a_cell_under_way_does_not_close(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    sweep = Sweep(layout, {})
    sweep.under_way("a")
    sweep.close()
    assert sweep.began
    Sweep(layout, {Sweep.VARIABLE: "other"}).ended("a")  # whoever finishes the cell
    sweep.close()
    assert not sweep.began


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

    monkeypatch.setattr(room, "write_whole", refuse)
    with pytest.raises(MatrixError) as caught:
        stage.run("next")
    assert str(caught.value) == (
        f"the disk is full ({stage.results.with_name(CELL.id + '.cell.json')}): free some space and run the same "
        "command again; finished verdicts are kept, and the sweep goes on after them"
    )
    monkeypatch.undo()
    assert stage.results.read_text() == OK.to_json() + "\n"


def test_a_cell_without_room_is_left_unfinished_and_the_same_command_goes_on_with_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = "the disk is full (while uv wrote to it): free some space and run the same command again"

    def refuse(lock: Lock, layout: Layout, say: object) -> Environment:
        raise DiskFull(full)

    stage.play(OK)
    first = Sweep(Layout(stage.root), {})
    with monkeypatch.context() as patch:
        patch.setattr(room, "ensure", refuse)
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
    assert stage.said == ["trl0.9.6: finished in a sweep that was cut short; taken over ('-- --fresh' runs it again)"]


def test_room_is_made_from_what_this_sweep_has_finished_and_does_not_want_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], list[str]]] = []

    def make_room(lock: Lock, layout: Layout, finished: Sequence[Lock], wanted: Sequence[Lock], say: object) -> None:
        asked.append(([each.cell_id for each in finished], [each.cell_id for each in wanted]))

    def kept(matrix: Matrix, cell: Cell, layout: Layout) -> Lock:
        if cell.id == "trl2":
            raise MatrixError("damaged")
        return dataclasses.replace(LOCK, cell_id=cell.id)

    monkeypatch.setattr(disk, "make_room", make_room)
    monkeypatch.setattr(room, "kept", kept)
    stage.play(OK)
    sweep = Sweep(Layout(stage.root), {})
    one, two, three, four = (Cell({"trl": str(number)}) for number in range(1, 5))
    run_cell(MATRIX, one, Sweep(Layout(stage.root), {Sweep.VARIABLE: "another"}), say=stage.said.append)
    run_cell(MATRIX, three, sweep, following=[two, four], say=stage.said.append)
    run_cell(MATRIX, four, sweep, say=stage.said.append)
    assert asked == [([], []), ([], ["trl4"]), (["trl3"], [])]


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
    assert "stopped; 1 finished verdict is kept, the same command goes on after it" in output
    assert "Traceback" not in output
    assert (stage.sidecar.state, stage.sidecar.reason) == ("interrupted", "it was stopped")
    mark = f"TRLCOMPAT_RUN={stage.calls[0]['environ']['TRLCOMPAT_RUN']}".encode()
    assert [path for path in Path("/proc").glob("[0-9]*/environ") if mark in _read(path)] == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
