"""``trlcompat bisect test``: one commit, judged by the exit status, as ``git bisect run`` needs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .fakes import COMMIT_CHECK, RUN_CHECK, states_of

if TYPE_CHECKING:
    from tests.conftest import GitHistory

ROOT = Path(__file__).resolve().parents[2]


def test_it_works_as_the_command_of_git_bisect_run(git_history: GitHistory, tmp_path: Path) -> None:
    states = states_of(40, 23, broken=range(0), missing={19, 20}, other=range(0))
    shas = git_history.make(tmp_path / "clone", states, COMMIT_CHECK)
    clone = tmp_path / "clone"
    git_history.run(clone, "bisect", "start", shas[-1], shas[0])
    command = [
        *(sys.executable, "-m", "pytest_trlcompat.bisect", "test", "--command", RUN_CHECK),
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
    "state, options, status, message",
    [
        ({"build": "fine", "other": False, "bad": False}, [], 0, "good (exit status 0)"),
        ({"build": "fine", "other": False, "bad": True}, [], 1, "bad (ValueError: loss is N"),
        (
            {"build": "missing", "other": False, "bad": True},
            [],
            125,
            "inconclusive (the command asked to skip this candidate",
        ),
        (
            {"build": "fine", "other": True, "bad": True},
            ["--expect", "ValueError"],
            125,
            "another failure than --expect",
        ),
    ],
)
def test_one_commit_is_judged_by_the_exit_status(
    git_history: GitHistory,
    tmp_path: Path,
    bisect: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    state: Mapping[str, Any],
    options: list[str],
    status: int,
    message: str,
) -> None:
    git_history.make(tmp_path / "clone", [{"number": 5, **state}], COMMIT_CHECK)
    assert bisect("test", "--clone", "clone", "--command", RUN_CHECK, *options) == status
    assert message in capsys.readouterr().out
