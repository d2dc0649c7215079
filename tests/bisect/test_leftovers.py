"""What a killed bisect leaves: nothing that runs, no files of commits, no folders of runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_trlcompat._processes import marked
from pytest_trlcompat.bisect import leftovers
from pytest_trlcompat.bisect.candidates.commits import Clone
from pytest_trlcompat.bisect.journal import Journal
from pytest_trlcompat.bisect.observation import Observation
from pytest_trlcompat.matrix.files import locked

from ..conftest import ROOT, GitHistory

CHECK = "import json, sys; sys.exit(json.load(open('state.json'))['number'] >= 5)"
STATES = [{"number": number} for number in range(9)]


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def command_line(shas: list[str], command: str, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "pytest_trlcompat.bisect", "commits", "--clone", "clone", "--good", shas[0]),
        *("--bad", shas[-1], "--command", command, "--state", "state", *more),
    ]


def variables(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **more}


def files_of_runs(state: Path) -> list[str]:
    found = [*state.glob("work/tree-*"), *state.glob("*/work/run-*")]
    return sorted(path.name.partition("-")[0] for path in found)


@pytest.mark.fault(
    "A bisect is killed by SIGKILL while its command runs, also in the background and in another session.",
    "Within seconds nothing of it runs, and the files of commits and runs are gone; the clone knows no worktree.",
)
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_killed_bisect_leaves_nothing(git_history: GitHistory, tmp_path: Path, jobs: str) -> None:
    shas = git_history.make(tmp_path / "clone", STATES, CHECK)
    mark = f"TEST_OF_LEFTOVERS={os.getpid()}-{jobs}-{time.monotonic_ns()}"
    command = "setsid sleep 300 & sleep 300 & sleep 300; true"
    words = command_line(shas, command, "--jobs", jobs)
    running = subprocess.Popen(
        words,
        cwd=tmp_path,
        env=variables(**dict([mark.split("=")])),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    state = tmp_path / "state"
    try:
        wait_for(lambda: sleeping(mark) == 3 * int(jobs))
        assert files_of_runs(state) == ["run"] * int(jobs) + ["tree"] * int(jobs)
    finally:
        running.kill()
        running.wait()
    wait_for(lambda: not marked(mark) and not files_of_runs(state), 30)
    assert len(git_history.run(tmp_path / "clone", "worktree", "list").splitlines()) == 1


def sleeping(mark: str) -> int:
    commands = []
    for pid in marked(mark):
        try:
            commands.append(Path(f"/proc/{pid}/comm").read_text().strip())
        except OSError:
            continue
    return commands.count("sleep")


@pytest.mark.fault(
    "A bisect and the process that cleans up after it are killed at once.",
    "The next command of the same state removes what they left, also where their parent has not taken note of their "
    "end, as init in a container may not for a while, and nothing of a bisect that runs.",
)
@pytest.mark.parametrize("is_zombie", [False, True])
def test_the_next_command_removes_what_a_killed_one_left(
    git_history: GitHistory, tmp_path: Path, is_zombie: bool
) -> None:
    shas = git_history.make(tmp_path / "clone", STATES, CHECK)
    clone, state = Clone(tmp_path / "clone"), tmp_path / "state"
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    if not is_zombie:
        ended.wait()
    (state / "work").mkdir(parents=True)
    runs = state / "command-x" / "work"
    for name in (f"run-{ended.pid}-a", "run-of_an_older_release", f"run-{os.getpid()}-b", f"run-{os.getppid()}-c"):
        (runs / name).mkdir(parents=True)
    trees = {pid: state / "work" / f"tree-{shas[0][:12]}-{pid}" for pid in (ended.pid, os.getppid())}
    for tree in trees.values():
        git_history.run(clone.path, "worktree", "add", "--quiet", "--detach", str(tree), shas[0])
    with leftovers.removed(state, [clone]):
        assert sorted(path.name for path in runs.iterdir()) == sorted([f"run-{os.getpid()}-b", f"run-{os.getppid()}-c"])
        assert [pid for pid, tree in trees.items() if tree.exists()] == [os.getppid()]
    assert [path.name for path in runs.iterdir()] == [f"run-{os.getppid()}-c"]
    assert [pid for pid, tree in trees.items() if tree.exists()] == [os.getppid()]
    assert len(git_history.run(clone.path, "worktree", "list").splitlines()) == 2
    ended.wait()


def test_a_bisect_that_ends_leaves_no_folder_of_a_run_and_nothing_that_waits(
    git_history: GitHistory, tmp_path: Path
) -> None:
    shas = git_history.make(tmp_path / "clone", STATES, CHECK)
    mark = f"TEST_OF_LEFTOVERS={os.getpid()}-{time.monotonic_ns()}"
    done = subprocess.run(
        command_line(shas, f"{sys.executable} check.py"),
        cwd=tmp_path,
        env=variables(**dict([mark.split("=")])),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert shas[5][:10] in done.stdout
    assert files_of_runs(tmp_path / "state") == []
    assert marked(mark) == []


@pytest.mark.fault(
    "Two bisects run at once in one checkout, with the same question.",
    "Both find the commit; the journal has whole lines alone, and neither removes what the other uses.",
)
def test_two_bisects_at_once_find_the_same(git_history: GitHistory, tmp_path: Path) -> None:
    shas = git_history.make(tmp_path / "clone", STATES, CHECK)
    words = command_line(shas, f"sleep 0.2; {sys.executable} check.py")
    both = [
        subprocess.Popen(
            [*words, "--json", f"{number}.json"],
            cwd=tmp_path,
            env=variables(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    printed = [running.communicate(timeout=120) for running in both]
    assert [running.returncode for running in both] == [0, 0], printed
    found = [json.loads((tmp_path / f"{number}.json").read_text())["culprit"]["first_bad"] for number in range(2)]
    assert found == [shas[5]] * 2
    (journal,) = (tmp_path / "state").glob("command-*/steps.jsonl")
    entries = [json.loads(line) for line in journal.read_text().splitlines()]
    assert {entry["label"].partition(" ")[0] for entry in entries} >= {shas[4][:10], shas[5][:10]}
    assert files_of_runs(tmp_path / "state") == []
    assert len(git_history.run(tmp_path / "clone", "worktree", "list").splitlines()) == 1


def test_a_step_that_another_command_is_writing_is_not_taken_for_a_torn_one(tmp_path: Path) -> None:
    whole = Journal(tmp_path)
    whole.add("a", "a", "id-a", Observation(passed={"x": "ok"}))
    path = tmp_path / "steps.jsonl"
    line = path.read_text()
    read: list[Journal] = []
    with locked(tmp_path / ".steps.lock"):  # as the other command does
        path.write_text(line + line[:30])
        reader = threading.Thread(target=lambda: read.append(Journal(tmp_path)))
        reader.start()
        reader.join(0.5)
        assert reader.is_alive()
        path.write_text(line + line)
    reader.join(20)
    assert len(read[0].entries) == 2
    assert path.read_text() == line + line


@pytest.mark.fault(
    "The disk fills up at every third step of a bisect.",
    "No step that was written is lost, no half line stays, and the error says what to do.",
)
def test_a_full_disk_costs_no_step_that_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, git_history: GitHistory, bisect: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The error of a full disk, raised at ``fsync`` with the step half written, as a disk that fills up does."""
    shas = git_history.make(tmp_path / "clone", STATES, CHECK)
    calls, real = [0], os.fsync

    def fsync(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] % 3 == 0:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - 5)
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    words = ["commits", "--clone", "clone", "--good", shas[0], "--bad", shas[-1]]
    words += ["--command", f"{sys.executable} check.py"]
    lines: list[str] = []
    failures = 0
    while failures < 9:
        status = bisect(*words)
        (journal,) = (tmp_path / "state").glob("command-*/steps.jsonl")
        now = journal.read_text().splitlines(keepends=True)
        assert now[: len(lines)] == lines
        assert all(line.endswith("}\n") and json.loads(line) for line in now)
        lines = now
        if status == 0:
            break
        assert status == 2
        failures += 1
        assert capsys.readouterr().err == (
            "trlcompat bisect: the disk is full: free some space and run the same command again; finished verdicts are "
            "kept, and the sweep continues after them\n"
        )
    assert status == 0
    assert failures > 0
    assert shas[5][:10] in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
