"""A cell as a job: what it leaves behind, what it goes on with after it was cut short, and how failures are told.

The environment is a stand-in whose ``python`` plays pytest: it appends verdicts as it was told and takes its time.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.matrix import process
from pytest_trlcompat.matrix import sweep as room
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.environments import Environment
from pytest_trlcompat.matrix.errors import MatrixError, Untestable
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.matrix.sweep import Outcome, Sidecar, Sweep, read_sidecar, run_cell
from pytest_trlcompat.verdict import Record, Verdict, append_record

ROOT = Path(__file__).resolve().parents[1]
CELL = Cell({"trl": "0.15.2", "transformers": "4.48.3"})
MATRIX = Matrix("3.11", {"torch": "2.13.0"}, ("torch", "trl"), (), (), 3)
LOCK = Lock(CELL.id, datetime.date(2025, 2, 28), "3.11", {"torch": "2.13.0", "trl": "0.15.2"}, "x")

OK = Record("issue-a", "corrected", "single", Verdict.OK, Verdict.OK, {}, 0.5)
BROKEN = Record("issue-a", "upstream", "single", Verdict.BROKEN, Verdict.BROKEN, {"n": 1}, 0.5)
SURPRISE = Record("issue-a", "upstream", "ddp", Verdict.OK, Verdict.BROKEN)
CRASH = Record("issue-b", "upstream", "ddp", Verdict.ERROR, None)

PYTEST = """#!{python}
import json, os, pathlib, sys, time
here = pathlib.Path({folder!r})
play = json.loads((here / "play.json").read_text())
results = pathlib.Path(sys.argv[sys.argv.index("--trlcompat-results") + 1])
with open(here / "calls.jsonl", "a") as file:
    before = results.read_text() if results.exists() else None
    print(json.dumps({{"arguments": sys.argv[1:], "environ": dict(os.environ), "before": before}}), file=file)
with open(results, "a") as file:
    file.writelines(line + "\\n" for line in play["lines"])
try:
    time.sleep(play["seconds"])
except KeyboardInterrupt:
    sys.exit(2)
if play["status"] < 0:
    os.kill(os.getpid(), -play["status"])
sys.exit(play["status"])
"""


@dataclass
class Stage:
    """A checkout in a temporary folder, whose cell's environment is a stand-in."""

    root: Path
    said: list[str] = field(default_factory=list)

    def play(self, *records: Record, status: int = 0, seconds: float = 0) -> None:
        """Tell the stand-in what to do."""
        lines = [record.to_json() for record in records]
        (self.root / "play.json").write_text(json.dumps({"lines": lines, "status": status, "seconds": seconds}))

    def run(self, sweep: str = "first", **options: Any) -> Outcome:
        named = Sweep(Layout(self.root), {Sweep.VARIABLE: sweep})
        return run_cell(MATRIX, CELL, named, say=self.said.append, **options)

    @property
    def calls(self) -> list[dict[str, Any]]:
        path = self.root / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def results(self) -> Path:
        return Layout(self.root).results / f"{CELL.id}.jsonl"

    @property
    def sidecar(self) -> Sidecar:
        return read_sidecar(self.results.with_name(f"{CELL.id}.cell.json"))

    def cut_short(self, sweep: str, *records: Record, torn: str = "") -> None:
        """Leave what a killed command leaves."""
        self.play(*records)
        self.run(sweep)
        Sweep(Layout(self.root), {Sweep.VARIABLE: sweep}).under_way(CELL.id)
        path = self.results.with_name(f"{CELL.id}.cell.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), "state": "running", "seconds": 100.0}))
        with open(self.results, "a") as file:
            file.write(torn)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage = make_stage(tmp_path)
    monkeypatch.setattr(room, "lock_for", lambda matrix, cell, layout: LOCK)
    monkeypatch.setattr(room, "ensure", lambda lock, layout, say: Environment(tmp_path / "env"))
    return stage


def make_stage(folder: Path) -> Stage:
    python = folder / "env" / "bin" / "python"
    for path in (python.parent, folder / "pytest_trlcompat", folder / "suites", folder / "fixtures"):
        path.mkdir(parents=True)
    (folder / "suites" / "test_a.py").touch()
    python.write_text(PYTEST.format(python=sys.executable, folder=str(folder)))
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return Stage(folder)


def test_a_tested_cell_leaves_its_verdicts_and_a_sidecar(stage: Stage) -> None:
    stage.play(OK, BROKEN)
    outcome = stage.run()
    assert (outcome.records, outcome.wrong, outcome.problem) == ((OK, BROKEN), [], None)
    raw = json.loads(stage.results.with_name(f"{CELL.id}.cell.json").read_text())
    assert raw.pop("seconds") < 10
    assert len(raw.pop("digest")) == 16
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
    }


def test_pytest_runs_the_suites_with_our_plugin_and_nothing_of_the_callers(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    tunable = "glibc.malloc.arena_max=1"
    callers = {"PYTEST_ADDOPTS": "-x", "PYTHONPATH": "/p", "HOME": "/home/me", "GLIBC_TUNABLES": tunable}
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
    assert environ["GLIBC_TUNABLES"] == f"{tunable}:glibc.malloc.hugetlb=1"


def test_modules_are_read_ahead_of_pytest_and_shared_after_it(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, int]] = []
    for name in ("read_ahead", "share_modules"):
        monkeypatch.setattr(Environment, name, lambda environment, name=name: started.append((name, len(stage.calls))))
    stage.play(OK)
    stage.run()
    assert started == [("read_ahead", 0), ("share_modules", 1)]


@pytest.mark.parametrize(
    ("begun", "built", "read"), [([], [2, 3], 2), ([2], [2, 3], 3), ([], [3], None), ([2, 3], [2, 3], None)]
)
def test_the_next_cells_environment_is_read_ahead_meanwhile(
    begun: Sequence[int], built: Sequence[int], read: int | None, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = {number: Cell({"trl": f"0.{number}.0"}) for number in (2, 3)}
    monkeypatch.setattr(room, "kept", lambda matrix, cell, layout: cell)
    monkeypatch.setattr(
        room,
        "standing",
        lambda lock, layout: next((Environment(stage.root / str(n)) for n in built if cells[n] == lock), None),
    )
    seen: list[tuple[Any, int]] = []

    @contextlib.contextmanager
    def beside(command: list[str], cwd: Path) -> Iterator[None]:
        seen.append((command, len(stage.calls)))
        yield
        seen.append(("ended", len(stage.calls)))

    monkeypatch.setattr(process, "beside", beside)
    for number in begun:
        Sweep(Layout(stage.root), {Sweep.VARIABLE: "first"}).under_way(cells[number].id)
    stage.play(OK)
    stage.run(following=tuple(cells.values()))
    reading = Environment(stage.root / str(read)).read_ahead_command()
    assert seen == ([(reading, 0), ("ended", 1)] if read else [])


def test_what_is_damaged_of_the_next_cell_does_not_stop_this_one(stage: Stage) -> None:
    following = Cell({"trl": "0.2.0"})
    stage.results.parent.mkdir(parents=True)
    stage.results.with_name(f"{following.id}.cell.json").write_text("torn")
    stage.play(OK)
    assert stage.run(following=[following]).problem is None


def test_a_cell_has_begun_while_it_runs_and_after_it(stage: Stage) -> None:
    sweeps = {name: Sweep(Layout(stage.root), {Sweep.VARIABLE: name}) for name in ("first", "second")}
    assert not sweeps["first"].has_begun(CELL.id)
    sweeps["first"].under_way(CELL.id)
    assert [sweep.has_begun(CELL.id) for sweep in sweeps.values()] == [True, False]
    stage.play(OK)
    stage.run("first")
    assert [sweep.has_begun(CELL.id) for sweep in sweeps.values()] == [True, False]


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
            "trl0.15.2-tf4.48.3 was not finished: verdicts are missing, pytest failed though all that it gave are as "
            "predicted; see its output",
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
            "trl0.15.2-tf4.48.3 was not finished: pytest collected no suite; is the issue's name right?",
        ),
        (
            (OK,),
            4,
            "interrupted",
            "trl0.15.2-tf4.48.3 was not finished: pytest ended with exit status 4; see its output",
        ),
    ],
)
def test_a_pytest_that_fails_otherwise_fails_the_cell(
    stage: Stage, records: tuple[Record, ...], status: int, state: str, problem: str
) -> None:
    stage.play(*records, status=status)
    outcome = stage.run()
    assert (outcome.sidecar.state, outcome.problem) == (state, problem)


def test_missing_verdicts_are_fetched_by_the_next_run(stage: Stage) -> None:
    stage.play(OK, status=1)
    stage.run()
    stage.play(BROKEN)
    outcome = stage.run("next")
    assert (outcome.records, outcome.problem) == ((OK, BROKEN), None)
    assert "--trlcompat-resume" in stage.calls[-1]["arguments"]


def test_a_cell_that_cannot_be_resolved_is_untestable_with_the_reason(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> Lock:
        raise Untestable("there is no version of trl==9.9.9")

    monkeypatch.setattr(room, "lock_for", refuse)
    outcome = stage.run()
    assert (outcome.sidecar.state, outcome.records, stage.calls) == ("untestable", (), [])
    assert outcome.problem == "trl0.15.2-tf4.48.3 is untestable: there is no version of trl==9.9.9"
    assert stage.sidecar.reason == "there is no version of trl==9.9.9"


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


@pytest.mark.parametrize("changed", ["suites/test_a.py", "pytest_trlcompat/judge.py", "fixtures/zero3.json"])
def test_what_verdicts_depend_on_has_changed_so_it_starts_afresh(stage: Stage, changed: str) -> None:
    stage.cut_short("killed", OK)
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


@pytest.mark.parametrize("file", ["jsonl", "cell.json"])
def test_a_damaged_results_file_is_named(stage: Stage, file: str) -> None:
    stage.cut_short("killed", OK)
    path = stage.results.with_name(f"{CELL.id}.{file}")
    path.write_text("{\n" + path.read_text())
    with pytest.raises(MatrixError, match=rf"{CELL.id}\.{file}.+remove (it|the file) and run the cell again"):
        stage.run("next")


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = [{root!r}, {tests!r}]
import test_matrix_sweep as here
from pytest_trlcompat.matrix import sweep as room
folder = Path({folder!r})
room.lock_for = lambda matrix, cell, layout: here.LOCK
room.ensure = lambda lock, layout, say: here.Environment(folder / "env")
try:
    here.Stage(folder, here.Said()).run("interrupted")
except KeyboardInterrupt:
    sys.exit(130)
"""


class Said(list[str]):
    """Prints what is said."""

    def append(self, text: str) -> None:
        print(text, flush=True)


def test_ctrl_c_in_the_middle_keeps_finished_verdicts_and_leaves_no_orphan(tmp_path: Path) -> None:
    stage = make_stage(tmp_path)
    stage.play(OK, seconds=300)
    script = SCRIPT.format(root=str(ROOT), tests=str(Path(__file__).parent), folder=str(tmp_path))
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


def test_two_that_run_the_same_cell_wait_for_each_other(stage: Stage) -> None:
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
    assert stage.said == ["trl0.15.2-tf4.48.3: another process runs it; waiting"]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
