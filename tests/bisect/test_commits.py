"""By commit, on real git histories: the right one in few steps, the clone left as it was, clear messages."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_trlcompat.bisect.cli import main

if TYPE_CHECKING:
    from tests.conftest import GitHistory

ROOT = Path(__file__).resolve().parents[2]

CHECK = """\
import json, sys
state = json.load(open("state.json"))
print("checking", state["number"])
if state["build"] == "missing":
    sys.exit(125)
if state["build"] == "broken":
    raise ImportError("cannot import name 'thing' from 'package'")
if state["other"]:
    raise KeyError(f"unrelated {state['number']}")
if state["bad"]:
    raise ValueError(f"loss is {0.1 * state['number']} instead of 0.5 at 0x{state['number']:x}")
"""


def states_of(count: int, turn: int, *, broken: range, missing: set[int], other: range) -> list[Mapping[str, Any]]:
    def build(number: int) -> str:
        if number in missing:
            return "missing"
        return "broken" if number in broken else "fine"

    return [
        {"number": number, "build": build(number), "other": number in other, "bad": number >= turn}
        for number in range(count)
    ]


@pytest.fixture
def bisect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> int:
        return main([*arguments, "--state", str(tmp_path / "state")])

    return run


PYTHON = f"{sys.executable} check.py"


def test_two_hundred_commits_with_unbuildable_ones_and_another_failure(
    git_history: GitHistory, tmp_path: Path, bisect: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    count, turn = 240, 151
    missing = {7, 33, 60, 119, 134, 180, 210}
    states = states_of(count, turn, broken=range(100, 118), missing=missing, other=range(160, 176))
    shas = git_history.make(tmp_path / "clone", states, CHECK)
    status = git_history.run(tmp_path / "clone", "status", "--porcelain=v2", "--branch")
    arguments = ["commits", "--clone", "clone", "--good", shas[0], "--bad", "main", "--command", PYTHON]
    assert bisect(*arguments, "--json", "result.json") == 0

    result = json.loads((tmp_path / "result.json").read_text())
    culprit = result["culprit"]
    assert (culprit["last_good"], culprit["first_bad"]) == (shas[turn - 1], shas[turn])
    assert culprit["commits"] == {
        "last_good": shas[turn - 1],
        "first_bad": shas[turn],
        "subject": f"change {turn}",
        "day": "2025-01-07",
    }
    assert culprit["cannot_tell"] == []
    assert result["failure"]["command"]["message"] == "loss is N instead of N at 0xN"

    between = result["steps"][2:]
    skipped = [step for step in between if step["answer"] == "cannot tell"]
    assert len(between) <= math.ceil(math.log2(count)) + len(skipped)
    assert len({step["candidate"] for step in result["steps"]}) == len(result["steps"])
    for step in result["steps"]:
        number = shas.index(step["candidate"])
        state = states[number]
        expected = "bad" if state["bad"] else "good"
        assert step["answer"] == (expected if state["build"] == "fine" and not state["other"] else "cannot tell")

    # Nothing of it is left in the clone.
    assert git_history.run(tmp_path / "clone", "status", "--porcelain=v2", "--branch") == status
    assert len(git_history.run(tmp_path / "clone", "worktree", "list").splitlines()) == 1
    assert not list((tmp_path / "state" / "work").glob("tree-*"))
    out = capsys.readouterr().out
    assert "bad is: ValueError: loss is N instead of N at 0xN in check.py:<module>\n" in out
    assert f"{shas[turn][:10]} (change {turn}) broke" in out


@pytest.mark.parametrize("turn", [1, 64, 119, 120, 199])
def test_the_turn_is_found_wherever_it_is(
    git_history: GitHistory, tmp_path: Path, bisect: Callable[..., int], turn: int
) -> None:
    states = states_of(200, turn, broken=range(120, 121), missing={50}, other=range(0))
    shas = git_history.make(tmp_path / "clone", states, CHECK)
    arguments = ["commits", "--clone", "clone", "--bad", shas[0], "--good", shas[-1], "--find-fix"]
    assert bisect(*arguments, "--command", f"! {PYTHON}", "--json", "result.json") == 0
    culprit = json.loads((tmp_path / "result.json").read_text())["culprit"]
    assert culprit["first_good"] == shas[turn]
    assert culprit["last_bad"] == shas[turn - 1]


def test_the_same_command_repeats_nothing(
    git_history: GitHistory, tmp_path: Path, bisect: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    shas = git_history.make(tmp_path / "clone", states_of(40, 23, broken=range(0), missing={20}, other=range(0)), CHECK)
    log = tmp_path / "runs"
    command = f"echo run >> {log}; {PYTHON}"
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
    assert "kept from an earlier run" in capsys.readouterr().out

    assert bisect(*arguments, "--fresh") == 0
    assert len(log.read_text().splitlines()) == 2 * runs


@pytest.mark.parametrize("jobs", ["1", "3"])
def test_it_goes_on_after_it_was_stopped(git_history: GitHistory, tmp_path: Path, jobs: str) -> None:
    shas = git_history.make(
        tmp_path / "clone", states_of(60, 37, broken=range(0), missing=set(), other=range(0)), CHECK
    )
    log, gate = tmp_path / "runs", tmp_path / "gate"
    # The fourth run waits until it is stopped.
    command = f'n=$(cat {log} 2>/dev/null | wc -l); echo run >> {log}; [ "$n" -lt 3 ] || [ -e {gate} ] || sleep 300; '
    command += PYTHON
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
    assert (
        "stopped; every finished step is kept, this goes on after them:\n  trlcompat bisect commits --clone clone"
        in err
    )
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


def test_with_jobs_the_next_possible_candidates_run_ahead_of_time(
    git_history: GitHistory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shas = git_history.make(
        tmp_path / "clone", states_of(60, 37, broken=range(0), missing=set(), other=range(0)), CHECK
    )
    words = [
        *(sys.executable, "-m", "pytest_trlcompat.bisect", "commits", "--clone", "clone", "--good", shas[0], "--jobs"),
        *("3", "--bad", shas[-1], "--command", PYTHON, "--state", "state", "--json", "result.json"),
    ]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "result.json").read_text())["culprit"]["first_bad"] == shas[37]
    assert "ahead of time: " in done.stdout
    assert len(git_history.run(tmp_path / "clone", "worktree", "list").splitlines()) == 1


TESTS = """\
import json
state = json.load(open("state.json"))
def test_other(): assert state["number"] < 5, "broken for another reason, at both ends"
def test_first(): assert state["number"] < 12, "the first one is wrong"
def test_second(): assert state["number"] < 17, "the second one is wrong"
def test_always(): assert not "known", "broken at both ends"
"""


@pytest.mark.parametrize("options, turn", [([], 12), (["--strategy", "*second"], 17)])
def test_with_several_checks_the_first_that_turns_decides(
    git_history: GitHistory, tmp_path: Path, bisect: Callable[..., int], options: list[str], turn: int
) -> None:
    shas = git_history.make(tmp_path / "clone", [{"number": number} for number in range(20)], TESTS)
    arguments = ["commits", "--clone", "clone", "--good", shas[6], "--bad", shas[-1]]
    assert bisect(*arguments, "--pytest", "check.py -p no:trlcompat", *options, "--json", "result.json") == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["culprit"]["first_bad"] == shas[turn]
    watched = {"check::test_first", "check::test_second"} if turn == 12 else {"check::test_second"}
    assert set(result["failure"]) == watched
    # The first end was seen before there was anything to hold it against.
    assert result["steps"][0]["answer"] == "good"


def test_an_answer_that_was_wrong_once_is_uncovered(
    git_history: GitHistory, tmp_path: Path, bisect: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """The commit in the middle is bad and says otherwise when it is asked first."""
    shas = git_history.make(
        tmp_path / "clone", states_of(41, 10, broken=range(0), missing=set(), other=range(0)), CHECK
    )
    lied = tmp_path / "lied"
    lie = f"grep -q '\"number\": 20,' state.json && [ ! -e {lied} ] && touch {lied} && exit 0"
    arguments = ["commits", "--clone", "clone", "--good", shas[0], "--bad", shas[-1]]
    options = ["--command", f"{lie}; {PYTHON}", "--noise", "0.05", "--confidence", "0.95", "--json", "result.json"]
    assert bisect(*arguments, *options) == 0
    assert lied.exists()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["culprit"]["first_bad"] == shas[10]
    assert result["culprit"]["confidence"] >= 0.95
    answers = [step["answer"] for step in result["steps"] if step["candidate"] == shas[20]]
    assert answers[:2] == ["good", "bad"]
    assert f"testing {shas[20][:10]} (change 20) once more, " in capsys.readouterr().out


def test_as_the_command_of_git_bisect_run(git_history: GitHistory, tmp_path: Path) -> None:
    states = states_of(40, 23, broken=range(0), missing={19, 20}, other=range(0))
    shas = git_history.make(tmp_path / "clone", states, CHECK)
    clone = tmp_path / "clone"
    git_history.run(clone, "bisect", "start", shas[-1], shas[0])
    command = [
        *(sys.executable, "-m", "pytest_trlcompat.bisect", "test", "--command", PYTHON),
        *("--state", str(tmp_path / "state")),
    ]
    done = subprocess.run(
        ["git", "bisect", "run", *command],
        cwd=clone,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{shas[23]} is the first bad commit" in done.stdout


@pytest.mark.parametrize(
    "state, options, status, said",
    [
        ({"build": "fine", "other": False, "bad": False}, [], 0, "good (exit status 0)"),
        ({"build": "fine", "other": False, "bad": True}, [], 1, "bad (ValueError: loss is N"),
        ({"build": "missing", "other": False, "bad": True}, [], 125, "cannot tell (the command asked to skip"),
        (
            {"build": "fine", "other": True, "bad": True},
            ["--expect", "ValueError"],
            125,
            "another failure than --expect",
        ),
    ],
)
def test_one_commit_is_answered_by_the_exit_status(
    git_history: GitHistory,
    tmp_path: Path,
    bisect: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    state: Mapping[str, Any],
    options: list[str],
    status: int,
    said: str,
) -> None:
    git_history.make(tmp_path / "clone", [{"number": 5, **state}], CHECK)
    assert bisect("test", "--clone", "clone", "--command", PYTHON, *options) == status
    assert said in capsys.readouterr().out


def test_a_release_branch_is_searched_from_where_it_left(
    git_history: GitHistory, tmp_path: Path, bisect: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    clone = tmp_path / "clone"
    shas = git_history.make(clone, states_of(20, 12, broken=range(0), missing=set(), other=range(0)), CHECK)
    git_history.run(clone, "checkout", "--quiet", "-b", "release", shas[5])
    (clone / "notes").write_text("a release\n")
    git_history.run(clone, "add", "notes")
    git_history.run(clone, "commit", "--quiet", "-m", "release")
    arguments = ["commits", "--clone", "clone", "--good", "release", "--bad", "main", "--command", PYTHON]
    assert bisect(*arguments, "--json", "result.json") == 0
    out = capsys.readouterr().out
    assert f"release lies on a branch beside main; the search starts at {shas[5][:10]}, where the branch left" in out
    assert json.loads((tmp_path / "result.json").read_text())["culprit"]["first_bad"] == shas[12]


def _dirty(clone: Path, shas: list[str]) -> None:
    (clone / "check.py").write_text("edited\n")


def _nothing(clone: Path, shas: list[str]) -> None:
    pass


@pytest.mark.parametrize(
    "prepare, good, bad, options, message",
    [
        (_dirty, 0, -1, [], "1 file has changes that are not committed (check.py), so they would be in none of the "),
        (_nothing, -1, 0, [], " in its history; swap them, or take --find-fix away or add it"),
        (_nothing, 0, 5, [], "both ends are good, so nothing turns between them. "),
        (_nothing, 25, -1, [], "both ends are bad, so nothing turns between them. "),
        (_nothing, -1, 0, ["--find-fix"], "good and bad are swapped. "),
        (_nothing, 3, 3, [], "; there is nothing to search"),
        (
            _nothing,
            0,
            "v9",
            [],
            "the revision 'v9' is unknown there; fetch it first (git fetch --tags), or name another",
        ),
        (_nothing, 10, -1, [], " cannot tell, so the search has no end to start from. "),
        (_nothing, 0, -1, ["--package", "numpy"], "--package numpy: the stack has torch, transformers, trl, "),
        (_nothing, 0, -1, ["--with", "trl=0.14.0"], "--with holds versions of an environment: say with --package "),
        (_nothing, 0, -1, ["--issue", "x"], "one of --issue ID, --pytest TEXT and --command TEXT says what is bad; "),
        (_nothing, 0, -1, ["--noise", "0.5"], "--noise 0.5: a probability below 0.5 is meant"),
        (_nothing, 0, -1, ["--jobs", "0"], "--jobs 0: at least 1 is meant"),
        (_nothing, 0, -1, ["--expect", "Nowhere"], "the failure at the bad end is not the one that was asked for: "),
    ],
)
def test_bad_input_is_one_clear_message(
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
    shas = git_history.make(clone, states_of(30, 20, broken=range(0), missing={10}, other=range(0)), CHECK)
    prepare(clone, shas)
    ends = ["--good", shas[good], "--bad", bad if isinstance(bad, str) else shas[bad]]
    assert bisect("commits", "--clone", "clone", *ends, "--command", PYTHON, *options) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("trlcompat bisect: ")
    assert "Traceback" not in err


def test_a_bare_clone_will_do(git_history: GitHistory, tmp_path: Path, bisect: Callable[..., int]) -> None:
    states = states_of(10, 6, broken=range(0), missing=set(), other=range(0))
    shas = git_history.make(tmp_path / "origin", states, CHECK)
    git_history.run(tmp_path, "clone", "--quiet", "--bare", "origin", "clone.git")
    arguments = ["commits", "--clone", "clone.git", "--good", shas[0], "--bad", shas[-1], "--command", PYTHON]
    assert bisect(*arguments, "--json", "result.json") == 0
    assert json.loads((tmp_path / "result.json").read_text())["culprit"]["first_bad"] == shas[6]


def test_what_is_no_clone_is_one_clear_message(
    tmp_path: Path, bisect: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plain").mkdir()
    for folder, message in (("plain", "this is no git clone"), ("none", "there is no such folder; give the folder of")):
        assert bisect("commits", "--clone", folder, "--good", "a", "--bad", "b", "--command", "true") == 2
        assert message in capsys.readouterr().err
