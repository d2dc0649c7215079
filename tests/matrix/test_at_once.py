"""Several commands at once in one checkout, and a disk that fills up again and again: nothing is lost or removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_trlcompat.bisect.candidates import environment_context
from pytest_trlcompat.catalog.verdict import Record, Verdict, append_record, read_records
from pytest_trlcompat.matrix import environments
from pytest_trlcompat.matrix import job as job_module
from pytest_trlcompat.matrix.environments import Environment, prune, remove
from pytest_trlcompat.matrix.errors import DiskFull
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.matrix.results import read_sidecar
from pytest_trlcompat.matrix.sweep import Sweep

from .made_up import LOCK, OK, Stage, records_in

ROOT = Path(__file__).resolve().parents[2]
FULL = (
    "the disk is full: free some space and run the same command again; finished verdicts are kept, and the sweep "
    "continues after them"
)

SWEEP = """
import dataclasses, os, random, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.matrix import made_up
from pytest_trlcompat.matrix import job as job_module
from pytest_trlcompat.matrix.cells import Cell
from pytest_trlcompat.matrix.environments import Environment
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.sweep import Sweep

folder, seed = Path(sys.argv[1]), int(sys.argv[2])
job_module.lock_for = lambda matrix, cell, layout: dataclasses.replace(made_up.LOCK, cell_id=cell.id)
job_module.disk.free_space = lambda *arguments: None
job_module.ensure = lambda lock, layout, say: Environment(folder / "env")
cells = [Cell({{"trl": f"0.{{number}}.0"}}) for number in range(4)] * 2
random.Random(seed).shuffle(cells)
sweep = Sweep(Layout(folder), {{}})
for cell in cells:
    outcome = job_module.run_cell(made_up.MATRIX, cell, sweep, say=lambda text: print(text, flush=True))
    assert outcome.problem is None, outcome.problem
    assert len(outcome.records) == 1
assert sweep.has_begun
sweep.close()
"""


@pytest.mark.fault(
    "Two sweeps of the same cells run at once in one checkout.",
    "One waits for a cell that the other runs, and takes over what that has measured; each verdict is there once.",
)
def test_two_sweeps_at_once(stage: Stage) -> None:
    stage.play(OK, seconds=0.05)
    command = [sys.executable, "-c", SWEEP.format(root=str(ROOT)), str(stage.root)]
    both = [
        subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for seed in (1, 2)
    ]
    printed = [running.communicate(timeout=120) for running in both]
    assert [(running.returncode, errors) for running, (_, errors) in zip(both, printed, strict=True)] == [(0, "")] * 2
    results = Layout(stage.root).results
    for number in range(4):
        assert records_in((results / f"trl0.{number}.0.jsonl").read_text()) == [OK]
        assert read_sidecar(results / f"trl0.{number}.0.cell.json").state == "tested"
    said = "".join(printed[0][0] + printed[1][0])
    measured = len(stage.calls)
    assert measured + said.count("finished in a sweep that still runs; its verdicts are reused") == 16
    assert 4 <= measured < 16
    assert [call["before"] for call in stage.calls] == [None] * measured  # nobody appended to what another was writing


def test_a_sweep_that_ends_while_another_begins_a_cell_does_not_stop_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (Sweep(Layout(tmp_path), {Sweep.VARIABLE: name}) for name in ("1-0", f"2-{2**22 + 1}"))
    real, calls = Path.touch, []

    def touch(path: Path) -> None:
        calls.append(path.name)
        if len(calls) == 1:
            one.close()  # between the other's two steps: its folder is there and empty
        real(path)

    monkeypatch.setattr(Path, "touch", touch)
    other.begin_cell("trl1.0.0")
    assert calls == ["trl1.0.0"] * 2
    assert other.has_begun


def test_a_sweep_that_ends_leaves_the_folder_of_one_that_runs(tmp_path: Path) -> None:
    one = Sweep(Layout(tmp_path), {Sweep.VARIABLE: "1-0"})
    runs = Sweep(Layout(tmp_path), {Sweep.VARIABLE: f"2-{os.getppid()}"})
    over = Sweep(Layout(tmp_path), {Sweep.VARIABLE: f"3-{2**22 + 1}"})
    for sweep in (one, runs, over):
        sweep.begin_cell("trl1.0.0")
        sweep.end_cell("trl1.0.0")
    one.close()
    assert [sweep.has_begun for sweep in (one, runs, over)] == [False, True, False]


@pytest.mark.fault(
    "`nox -s clean` runs while a sweep has just built an environment whose lock was renewed meanwhile.",
    "The environment stays, and so does one that is being built; it goes with the next `nox -s clean`.",
)
def test_clean_spares_what_a_sweep_is_about_to_use(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(stage.root)
    said: list[str] = []
    root = environments._root(LOCK, layout)

    def ensure(lock: Lock, layout: Layout, say: object) -> Environment:
        root.mkdir(parents=True)
        prune(layout, [], said.append)  # before the environment is used, and while it is built
        assert remove(lock, layout) is False
        return Environment(stage.root / "env")

    monkeypatch.setattr(job_module, "ensure", ensure)
    stage.play(OK)
    assert stage.run().problem is None
    assert said == [f"{root.name}: belongs to no lock, but is in use"]
    prune(layout, [], said.append)
    assert not root.exists()


@pytest.mark.fault("`nox -s clean` runs while a bisect tests a candidate.", "The environment of the candidate stays.")
def test_clean_spares_what_a_bisect_is_about_to_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(tmp_path)
    root = environments._root(LOCK, layout)

    def ensure(lock: Lock, layout: Layout, say: object) -> Environment:
        root.mkdir(parents=True)
        prune(layout, [])
        return Environment(root)

    monkeypatch.setattr("pytest_trlcompat.bisect.candidates.ensure", ensure)
    with environment_context(LOCK, layout, tmp_path, print):
        prune(layout, [])
        assert root.exists()
    prune(layout, [])
    assert not root.exists()


def test_two_processes_one_sweeps_and_one_cleans(stage: Stage) -> None:
    """A real process holds the environment, and is then killed: the mark of its use goes with it."""
    layout = Layout(stage.root)
    root = environments._root(LOCK, layout)
    root.mkdir(parents=True)
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from tests.matrix.made_up import LOCK; from pytest_trlcompat.matrix.environments import reserved\n"
        "from pytest_trlcompat.matrix.layout import Layout\n"
        "with reserved(LOCK, Layout(Path(sys.argv[2]))): print('in use', flush=True); time.sleep(300)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(ROOT), str(stage.root)], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"in use\n"
        prune(layout, [])
        assert root.exists()
        running.kill()
    prune(layout, [])
    assert not root.exists()


# ---- a disk that fills up


@pytest.mark.fault(
    "The disk fills up at every tenth verdict, in the middle of its line.",
    "That verdict is refused, each other one is whole and stays, and no half line is left.",
)
def test_a_disk_that_fills_at_every_tenth_verdict_loses_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is that of the kernel where a file system is full: a short write."""
    real, calls = os.write, [0]

    def write(descriptor: int, data: bytes) -> int:
        calls[0] += 1
        return real(descriptor, data[: len(data) // 2] if calls[0] % 10 == 0 else data)

    monkeypatch.setattr(os, "write", write)
    path, written = tmp_path / "cell.jsonl", []
    for number in range(100):
        record = Record(f"issue-{number}", "upstream", "single", Verdict.OK, Verdict.OK)
        if number % 10 == 9:
            with pytest.raises(OSError, match="no space left for a verdict"):
                append_record(path, record)
        else:
            append_record(path, record)
            written.append(record)
        assert read_records(path) == written
    assert len(written) == 90
    assert len(path.read_text().splitlines()) == 90


@pytest.mark.fault(
    "The disk is full when a sweep writes a cell's state, at its end, and again when it begins anew.",
    "The command ends with one error that says what to do; repeated, it finishes, and each verdict is there once.",
)
def test_a_disk_that_fills_again_and_again_costs_no_verdict(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.replace, [0]

    def replace(source: str, target: Path) -> None:
        calls[0] += 1
        if calls[0] in (2, 3):
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    stage.play(OK)
    errors = []
    for attempt in range(1, 6):
        try:
            outcome = stage.run(f"sweep {attempt}")
        except DiskFull as error:
            errors.append(str(error))
            assert records_in(stage.results.read_text()) == [OK]  # written before the disk was full
            stage.play()  # what has its verdict is not measured again
        else:
            break
    assert errors == [FULL] * len(errors)
    assert len(errors) == 2
    assert (outcome.problem, list(outcome.records)) == (None, [OK])
    assert json.loads(stage.results.read_text())["issue"] == OK.issue
    assert [path.name for path in stage.results.parent.iterdir() if ".cell.json." in path.name] == []
