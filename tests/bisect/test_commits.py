"""By commit, on real git histories: the right commit in few steps, an untouched clone, clear messages."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat.bisect.candidates.commits import Clone

from .fakes import COMMIT_CHECK, RUN_CHECK, states_of

if TYPE_CHECKING:
    from tests.conftest import GitHistory

ROOT = Path(__file__).resolve().parents[2]


def test_the_commit_is_found_among_unbuildable_ones_and_other_failures(
    git_history: GitHistory, tmp_path: Path, bisect: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    count, change = 240, 151
    missing = {7, 33, 60, 119, 134, 180, 210}
    states = states_of(count, change, broken=range(100, 118), missing=missing, other=range(160, 176))
    shas = git_history.make(tmp_path / "clone", states, COMMIT_CHECK)
    status = git_history.run(tmp_path / "clone", "status", "--porcelain=v2", "--branch")
    arguments = ["commits", "--clone", "clone", "--good", shas[0], "--bad", "main", "--command", RUN_CHECK]
    assert bisect(*arguments, "--json", "result.json") == 0

    result = json.loads((tmp_path / "result.json").read_text())
    culprit = result["culprit"]
    assert (culprit["last_good"], culprit["first_bad"]) == (shas[change - 1], shas[change])
    assert culprit["commits"] == {
        "last_good": shas[change - 1],
        "first_bad": shas[change],
        "subject": f"change {change}",
        "day": "2025-01-07",
    }
    assert culprit["inconclusive"] == []
    assert result["failure"]["command"]["message"] == "loss is N instead of N at 0xN"

    between = result["steps"][2:]
    skipped = [step for step in between if step["answer"] == "inconclusive"]
    assert len(between) <= math.ceil(math.log2(count)) + len(skipped)
    assert len({step["candidate"] for step in result["steps"]}) == len(result["steps"])
    for step in result["steps"]:
        number = shas.index(step["candidate"])
        state = states[number]
        expected = "bad" if state["bad"] else "good"
        assert step["answer"] == (expected if state["build"] == "fine" and not state["other"] else "inconclusive")

    # The clone is as it was.
    assert git_history.run(tmp_path / "clone", "status", "--porcelain=v2", "--branch") == status
    assert len(git_history.run(tmp_path / "clone", "worktree", "list").splitlines()) == 1
    assert not list((tmp_path / "state" / "work").glob("tree-*"))
    out = capsys.readouterr().out
    assert "bad means: ValueError: loss is N instead of N at 0xN in check.py:<module>\n" in out
    assert f"{shas[change][:10]} (change {change}) broke" in out


@pytest.mark.parametrize("change", [1, 64, 119, 120, 199])
def test_the_change_is_found_wherever_it_is(
    git_history: GitHistory, tmp_path: Path, bisect: Callable[..., int], change: int
) -> None:
    states = states_of(200, change, broken=range(120, 121), missing={50}, other=range(0))
    shas = git_history.make(tmp_path / "clone", states, COMMIT_CHECK)
    arguments = ["commits", "--clone", "clone", "--bad", shas[0], "--good", shas[-1], "--find-fix"]
    assert bisect(*arguments, "--command", f"! {RUN_CHECK}", "--json", "result.json") == 0
    culprit = json.loads((tmp_path / "result.json").read_text())["culprit"]
    assert culprit["first_good"] == shas[change]
    assert culprit["last_bad"] == shas[change - 1]


def test_the_same_command_repeats_nothing(
    git_history: GitHistory, tmp_path: Path, bisect: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    shas = git_history.make(
        tmp_path / "clone", states_of(40, 23, broken=range(0), missing={20}, other=range(0)), COMMIT_CHECK
    )
    log = tmp_path / "runs"
    command = f"echo run >> {log}; {RUN_CHECK}"
    arguments = ["commits", "--clone", "clone", "--good", shas[0], "--bad", shas[-1], "--command", command]
    assert bisect(*arguments, "--json", "first.json") == 0
    runs = len(log.read_text().splitlines())
    assert runs == len(json.loads((tmp_path / "first.json").read_text())["steps"])
    capsys.readouterr()

    assert bisect(*arguments, "--json", "second.json") == 0
    assert len(log.read_text().splitlines()) == runs
    first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("first", "second"))
    assert second["culprit"] == first["culprit"]
    assert all(step["kept"] for step in second["steps"])
    assert "[from an earlier run]" in capsys.readouterr().out

    assert bisect(*arguments, "--fresh") == 0
    assert len(log.read_text().splitlines()) == 2 * runs


@pytest.mark.parametrize("jobs", ["1", "3"])
def test_a_stopped_search_continues_where_it_was(git_history: GitHistory, tmp_path: Path, jobs: str) -> None:
    shas = git_history.make(
        tmp_path / "clone", states_of(60, 37, broken=range(0), missing=set(), other=range(0)), COMMIT_CHECK
    )
    log, gate = tmp_path / "runs", tmp_path / "gate"
    # The fourth run waits until it is stopped.
    command = f'n=$(cat {log} 2>/dev/null | wc -l); echo run >> {log}; [ "$n" -lt 3 ] || [ -e {gate} ] || sleep 300; '
    command += RUN_CHECK
    words = [
        *(sys.executable, "-m", "pytest_trlcompat.bisect", "commits", "--clone", "clone", "--good", shas[0]),
        *("--bad", shas[-1], "--command", command, "--jobs", jobs, "--state", "state", "--json", "result.json"),
    ]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    child = subprocess.Popen(
        words, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    steps = tmp_path / "state"

    def finished() -> int:
        return sum(len(path.read_text().splitlines()) for path in steps.glob("command-*/steps.jsonl"))

    try:
        # With three jobs the fourth run may begin before any of the first is written down.
        while not log.exists() or len(log.read_text().splitlines()) < 4 or not finished():
            assert child.poll() is None
        child.terminate()
        _, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130
    assert "stopped; every finished step is kept. To continue:\n  trlcompat bisect commits --clone clone" in err
    assert "Traceback" not in err
    assert not list((steps / "work").glob("tree-*"))
    kept = finished()

    gate.touch()
    before = len(log.read_text().splitlines())
    done = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["culprit"]["first_bad"] == shas[37]
    assert sum(step["kept"] for step in result["steps"]) == kept
    if jobs == "1":
        assert len(log.read_text().splitlines()) - before == sum(not step["kept"] for step in result["steps"])


def test_with_jobs_the_next_possible_candidates_are_tested_ahead_of_time(
    git_history: GitHistory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shas = git_history.make(
        tmp_path / "clone", states_of(60, 37, broken=range(0), missing=set(), other=range(0)), COMMIT_CHECK
    )
    words = [
        *(sys.executable, "-m", "pytest_trlcompat.bisect", "commits", "--clone", "clone", "--good", shas[0], "--jobs"),
        *("3", "--bad", shas[-1], "--command", RUN_CHECK, "--state", "state", "--json", "result.json"),
    ]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "result.json").read_text())["culprit"]["first_bad"] == shas[37]
    assert "  testing ahead of time: " in done.stdout
    assert len(git_history.run(tmp_path / "clone", "worktree", "list").splitlines()) == 1


TESTS = """\
import json
state = json.load(open("state.json"))
def test_other(): assert state["number"] < 5, "broken for another reason, at both ends"
def test_first(): assert state["number"] < 12, "the first one is wrong"
def test_second(): assert state["number"] < 17, "the second one is wrong"
def test_always(): assert not "known", "broken at both ends"
"""


@pytest.mark.parametrize("options, change", [([], 12), (["--strategy", "*second"], 17)])
def test_of_several_checks_the_first_that_fails_decides(
    git_history: GitHistory, tmp_path: Path, bisect: Callable[..., int], options: list[str], change: int
) -> None:
    shas = git_history.make(tmp_path / "clone", [{"number": number} for number in range(20)], TESTS)
    arguments = ["commits", "--clone", "clone", "--good", shas[6], "--bad", shas[-1]]
    assert bisect(*arguments, "--pytest", "check.py -p no:trlcompat", *options, "--json", "result.json") == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["culprit"]["first_bad"] == shas[change]
    failing = {"check::test_first", "check::test_second"} if change == 12 else {"check::test_second"}
    assert set(result["failure"]) == failing
    # The first end was tested before the signature was known.
    assert result["steps"][0]["answer"] == "good"


def test_a_wrong_answer_is_uncovered_by_testing_again(
    git_history: GitHistory, tmp_path: Path, bisect: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """The commit in the middle is bad, but passes when it is first tested."""
    shas = git_history.make(
        tmp_path / "clone", states_of(41, 10, broken=range(0), missing=set(), other=range(0)), COMMIT_CHECK
    )
    passed = tmp_path / "passed"
    pass_once = f"grep -q '\"number\": 20,' state.json && [ ! -e {passed} ] && touch {passed} && exit 0"
    arguments = ["commits", "--clone", "clone", "--good", shas[0], "--bad", shas[-1]]
    options = [
        "--command",
        f"{pass_once}; {RUN_CHECK}",
        "--noise",
        "0.05",
        "--confidence",
        "0.95",
        "--json",
        "result.json",
    ]
    assert bisect(*arguments, *options) == 0
    assert passed.exists()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["culprit"]["first_bad"] == shas[10]
    assert result["culprit"]["confidence"] >= 0.95
    answers = [step["answer"] for step in result["steps"] if step["candidate"] == shas[20]]
    assert answers[:2] == ["good", "bad"]
    assert f"testing {shas[20][:10]} (change 20) again, " in capsys.readouterr().out


def test_the_search_starts_where_a_release_branch_diverged(
    git_history: GitHistory, tmp_path: Path, bisect: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    clone = tmp_path / "clone"
    shas = git_history.make(clone, states_of(20, 12, broken=range(0), missing=set(), other=range(0)), COMMIT_CHECK)
    git_history.run(clone, "checkout", "--quiet", "-b", "release", shas[5])
    (clone / "notes").write_text("a release\n")
    git_history.run(clone, "add", "notes")
    git_history.run(clone, "commit", "--quiet", "-m", "release")
    arguments = ["commits", "--clone", "clone", "--good", "release", "--bad", "main", "--command", RUN_CHECK]
    assert bisect(*arguments, "--json", "result.json") == 0
    out = capsys.readouterr().out
    assert f"release is on another branch than main; the search starts at {shas[5][:10]}, where they diverged" in out
    assert json.loads((tmp_path / "result.json").read_text())["culprit"]["first_bad"] == shas[12]


def _dirty(clone: Path, shas: list[str]) -> None:
    (clone / "check.py").write_text("edited\n")


def _nothing(clone: Path, shas: list[str]) -> None:
    pass


@pytest.mark.parametrize(
    "prepare, good, bad, options, message",
    [
        (_dirty, 0, -1, [], "1 file has uncommitted changes (check.py), which no tested commit would contain; "),
        (
            _nothing,
            -1,
            0,
            [],
            "; the bad commit must be the later one, with --find-fix the good one: swap --good and --bad",
        ),
        (_nothing, 0, 5, [], "both ends are good, so there is no change to find. "),
        (_nothing, 25, -1, [], "both ends are bad, so there is no change to find. "),
        (_nothing, -1, 0, ["--find-fix"], "good and bad are swapped. "),
        (_nothing, 3, 3, [], ", so there is nothing to search; name two commits"),
        (
            _nothing,
            0,
            "v9",
            [],
            "unknown revision 'v9'; fetch it (git fetch --tags), or name another",
        ),
        (_nothing, 10, -1, [], " is inconclusive, so the search cannot start. "),
        (_nothing, 0, -1, ["--package", "numpy"], "--package numpy: must be one of torch, transformers, trl, "),
        (
            _nothing,
            0,
            -1,
            ["--with", "trl=0.14.0"],
            "--with needs an environment: name with --package which package the clone is",
        ),
        (
            _nothing,
            0,
            -1,
            ["--issue", "x"],
            "exactly one of --issue, --pytest and --command must say what is bad; found --issue and --command",
        ),
        (_nothing, 0, -1, ["--noise", "0.5"], "--noise 0.5: must be at least 0 and below 0.5"),
        (_nothing, 0, -1, ["--jobs", "0"], "--jobs 0: must be at least 1"),
        (
            _nothing,
            0,
            -1,
            ["--expect", "Nowhere"],
            "--expect 'Nowhere': the bad end fails differently: ValueError: loss is N instead of N",
        ),
    ],
)
def test_invalid_input_is_refused_with_one_clear_message(
    git_history: GitHistory,
    tmp_path: Path,
    bisect: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    prepare: Callable[[Path, list[str]], None],
    good: int,
    bad: int | str,
    options: list[str],
    message: str,
) -> None:
    clone = tmp_path / "clone"
    shas = git_history.make(clone, states_of(30, 20, broken=range(0), missing={10}, other=range(0)), COMMIT_CHECK)
    prepare(clone, shas)
    ends = ["--good", shas[good], "--bad", bad if isinstance(bad, str) else shas[bad]]
    assert bisect("commits", "--clone", "clone", *ends, "--command", RUN_CHECK, *options) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("trlcompat bisect: ")
    assert "Traceback" not in err


def test_git_itself_holds_the_lock_while_it_changes_worktrees(
    git_history: GitHistory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the lock is not free before git has ended, even when the process that started it is killed."""
    git_history.make(tmp_path / "clone", [{"number": 0}])
    files, log = tmp_path / "files", tmp_path / "open_files"
    program = tmp_path / "bin" / "git"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$*" >> {log}\nls -l /proc/$$/fd >> {log}\nexec {shutil.which("git")} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    clone = Clone(tmp_path / "clone")
    with clone.worktree(clone.commit("HEAD"), files / "tree"):
        pass
    calls = log.read_text().split("-C ")[1:]
    holding = [".worktrees.lock" in call for call in calls]
    changing = [" worktree " in call for call in calls]
    assert changing == [False, True, True]
    assert holding == changing


def test_a_bare_clone_can_be_searched(git_history: GitHistory, tmp_path: Path, bisect: Callable[..., int]) -> None:
    states = states_of(10, 6, broken=range(0), missing=set(), other=range(0))
    shas = git_history.make(tmp_path / "origin", states, COMMIT_CHECK)
    git_history.run(tmp_path, "clone", "--quiet", "--bare", "origin", "clone.git")
    arguments = ["commits", "--clone", "clone.git", "--good", shas[0], "--bad", shas[-1], "--command", RUN_CHECK]
    assert bisect(*arguments, "--json", "result.json") == 0
    assert json.loads((tmp_path / "result.json").read_text())["culprit"]["first_bad"] == shas[6]


def test_a_folder_that_is_no_clone_is_refused_with_one_clear_message(
    tmp_path: Path, bisect: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plain").mkdir()
    for folder, message in (("plain", "not a git clone"), ("none", "no such folder; name the folder of")):
        assert bisect("commits", "--clone", folder, "--good", "a", "--bad", "b", "--command", "true") == 2
        assert message in capsys.readouterr().err


def test_what_others_are_to_repeat_names_no_folder_of_this_machine(
    git_history: GitHistory, tmp_path: Path, bisect: Callable[..., int]
) -> None:
    states = states_of(10, 6, broken=range(0), missing=set(), other=range(0))
    shas = git_history.make(tmp_path / "mine", states, COMMIT_CHECK)
    ends = ["--good", shas[0], "--bad", shas[-1], "--command", RUN_CHECK, "--json", "result.json"]
    for words in (["--clone", str(tmp_path / "mine")], [f"--clone={tmp_path / 'mine'}"]):
        assert bisect("commits", *words, *ends) == 0
        command = json.loads((tmp_path / "result.json").read_text())["command"]
        assert "/path/to/mine" in command
        assert str(tmp_path) not in command
    assert bisect("commits", "--clone", "mine", *ends) == 0
    assert "--clone mine " in json.loads((tmp_path / "result.json").read_text())["command"]
