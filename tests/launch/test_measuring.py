"""Coverage of ranks without configuration, held against coverage's own patches, which measure the same processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = """
def in_rank(number):
    if number > 0:
        kind = "positive"
    else:
        kind = "other"
    return kind


def in_another(number):
    return -number


def never():
    return None
"""
TEST = """
import os

from library import in_another, in_rank


def body(number):
    return in_rank(number)


def change_folder(folder):
    os.chdir(folder)
    return in_another(1)


def test_it(launcher, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launcher(body, 1, strategy="single").values == ["positive"]
    assert launcher(change_folder, str(tmp_path), strategy="single").values == [-1]
"""
PATCHED = "[run]\nsource = .\nparallel = true\npatch = subprocess, _exit, fork\n"
PYTEST = ("-p", "pytest_trlcompat.plugin", "-p", "no:cacheprovider", "--trlcompat-device=cpu", "-q")
Lines = dict[str, tuple[list[int], list[list[int]]]]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "library.py").write_text(LIBRARY)
    (tmp_path / "test_it.py").write_text(TEST)
    return tmp_path


def python(project: Path, *arguments: str) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV", "TRLCOMPAT_"))}
    environment = {
        **kept,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    done = subprocess.run(
        [sys.executable, *arguments], cwd=project, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def lines_of(project: Path) -> Lines:
    """Lines that were run, and branches that were taken, by file."""
    python(project, "-m", "coverage", "json", "-q", "-o", "coverage.json")
    files = json.loads((project / "coverage.json").read_text())["files"]
    return {name: (entry["executed_lines"], entry.get("executed_branches", [])) for name, entry in files.items()}


def by_patches(project: Path) -> Lines:
    (project / "patched.ini").write_text(PATCHED)
    python(project, "-m", "coverage", "run", "--rcfile=patched.ini", "-m", "pytest", *PYTEST)
    python(project, "-m", "coverage", "combine", "-q", "--rcfile=patched.ini")
    found = lines_of(project)
    (project / ".coverage").unlink()
    return found


def test_coverage_run_counts_the_lines_of_ranks(project: Path) -> None:
    python(project, "-m", "coverage", "run", "--source=.", "-m", "pytest", *PYTEST)
    assert [file.name for file in project.glob(".coverage*")] == [".coverage"]
    found = lines_of(project)
    assert found["library.py"] == ([2, 3, 4, 7, 10, 11, 14], [])
    assert found == by_patches(project)


def test_branches_too(project: Path) -> None:
    python(project, "-m", "coverage", "run", "--branch", "--source=.", "-m", "pytest", *PYTEST)
    assert lines_of(project)["library.py"] == ([2, 3, 4, 7, 10, 11, 14], [[3, 4]])


@pytest.mark.parametrize("xdist", [(), ("-p", "xdist", "-n", "1")], ids=["alone", "xdist"])
def test_pytest_cov_counts_the_lines_of_ranks(project: Path, xdist: tuple[str, ...]) -> None:
    python(project, "-m", "pytest", "-p", "pytest_cov", "--cov=.", "--cov-report=", *xdist, *PYTEST)
    found = lines_of(project)
    assert found["library.py"] == ([2, 3, 4, 7, 10, 11, 14], [])
    assert found == by_patches(project)


def test_a_rank_that_coverage_measures_already_is_not_measured_twice(project: Path) -> None:
    assert by_patches(project)["library.py"] == ([2, 3, 4, 7, 10, 11, 14], [])


def test_where_nothing_is_measured_nothing_is_imported(project: Path) -> None:
    (project / "test_it.py").write_text(
        "import sys\n"
        "def test_it(launcher):\n"
        "    assert launcher(lambda: 'coverage' in sys.modules, strategy='single').values == [False]\n"
    )
    python(project, "-m", "pytest", *PYTEST)
