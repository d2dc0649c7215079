"""Planting faults in a copy of the checkout, and running tests there; for ``mutations.py`` and ``absences.py``."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

from pytest_trlcompat.matrix.cells import Cell
from pytest_trlcompat.matrix.environments import Environment, ensure
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.locks import lock_for
from pytest_trlcompat.matrix.parsing import parse_pins
from pytest_trlcompat.matrix.sessions import Project

__all__ = ["ROOT", "copied_checkout", "environment_of", "outcomes_of_report", "plant", "run_pytest"]

ROOT = Path(__file__).resolve().parents[1]
COPIED = (
    *("pytest_trlcompat", "suites", "fixtures", "tests", "docs"),
    *("pyproject.toml", "README.md", "hatch_build.py", "noxfile.py"),
)
TIMEOUT = 900.0
"""Seconds for one suite, or one file of tests, in one cell."""


def plant(checkout: Path, file: str, old: str, new: str) -> None:
    """Replace a text that occurs exactly once in a file below ``checkout``.

    Raises:
        MatrixError: when it does not occur there exactly once.
    """
    path = checkout / file
    text = path.read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise MatrixError(f"{file}: {old!r} occurs there {text.count(old)} times instead of once")
    path.write_text(text.replace(old, new), encoding="utf-8")


@contextmanager
def copied_checkout(more: tuple[str, ...] = ()) -> Iterator[Path]:
    """A copy of the checkout in a temporary folder.

    Args:
        more: files and folders of the checkout to copy as well.
    """
    with tempfile.TemporaryDirectory(prefix="trlcompat-mutation-") as folder:
        for name in (*COPIED, *more):
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, folder)
        yield Path(folder)


def run_pytest(python: Path, variables: dict[str, str], checkout: Path, *arguments: str) -> None:
    """Run pytest in a copy of the checkout; what it prints is in ``pytest.log`` there.

    Args:
        python: the interpreter.
        variables: of its environment.

    Raises:
        subprocess.TimeoutExpired: it did not end within :data:`TIMEOUT`.
    """
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON"))},
        **variables,
        "PYTHONPATH": str(checkout),  # before the checkout that is installed there
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with open(checkout / "pytest.log", "wb") as log:
        subprocess.run(command, cwd=checkout, env=environment, stdout=log, stderr=log, check=False, timeout=TIMEOUT)


def outcomes_of_report(report: Path) -> dict[str, str]:
    """``ok``, ``failed`` or ``absent`` by the name of each test in pytest's JUnit report.

    A file that cannot be collected is no test; empty where there is no report.
    """
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        failed = any(case.find(kind) is not None for kind in ("failure", "error"))
        outcome = "failed" if failed else "ok" if case.find("skipped") is None else "absent"
        outcomes[case.get("name", "")] = outcome
    return outcomes


@cache
def environment_of(cell: str) -> Environment:
    """The environment of a cell by its pins, ``trl=0.15.2 transformers=4.48.3``; built if it does not exist."""
    project = _project()
    lock = lock_for(project.matrix, Cell(parse_pins(cell.split())), project.layout)
    return ensure(lock, project.layout)


@cache
def _project() -> Project:
    return Project(ROOT)
