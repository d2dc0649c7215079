"""Coverage of this project's tests: processes that are forked and end with ``os._exit`` count, and totals add up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from pytest_trlcompat.matrix.own_coverage import JSON, format_totals, reporting_commands, run_command

ROOT = Path(__file__).resolve().parents[2]
MODULE = """
import os

def in_parent():
    return 1

def in_rank_0():
    return 2

def in_rank_1():
    return 3

def never():
    return 4
"""
TEST = """
import os, subprocess, sys
from pytest_trlcompat import module

def test_it():
    assert module.in_parent() == 1
    fork = "pid = os.fork(); pid or (module.{}(), os._exit(0)); os.waitpid(pid, 0); "
    code = "import os; from pytest_trlcompat import module; " + fork.format("in_rank_0") + fork.format("in_rank_1")
    subprocess.run([sys.executable, "-c", code], check=True)
"""


def test_lines_count_that_run_only_in_forked_children_of_another_process(tmp_path: Path) -> None:
    """As in a rank, which the warm server forks."""
    package = tmp_path / "pytest_trlcompat"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "module.py").write_text(MODULE)
    (tmp_path / "test_it.py").write_text(TEST)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for command in [run_command(["-p", "no:trlcompat", "-p", "no:cacheprovider", "test_it.py"]), *reporting_commands()]:
        done = subprocess.run([sys.executable, *command[1:]], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    file = json.loads((tmp_path / JSON).read_text())["files"]["pytest_trlcompat/module.py"]
    assert file["missing_lines"] == [14]


def test_totals_are_those_of_packages_and_of_all(tmp_path: Path) -> None:
    counts = {
        "pytest_trlcompat/stack.py": (1, 4),
        "pytest_trlcompat/launch/rank.py": (9, 10),
        "pytest_trlcompat/matrix/report/model.py": (0, 0),
        "pytest_trlcompat/launch/client.py": (10, 10),
        "suites/ppo/runs.py": (0, 6),
    }
    files = {
        name: {"summary": {"covered_lines": covered, "num_statements": statements}}
        for name, (covered, statements) in counts.items()
    }
    (tmp_path / JSON).parent.mkdir(parents=True)
    (tmp_path / JSON).write_text(json.dumps({"files": files}))
    assert format_totals(tmp_path).splitlines() == [
        "package                  covered  statements         ",
        "pytest_trlcompat               1           4   25.0 %",
        "pytest_trlcompat/launch       19          20   95.0 %",
        "pytest_trlcompat/matrix        0           0  100.0 %",
        "suites/ppo                     0           6    0.0 %",
        "all                           20          30   66.7 %",
    ]
