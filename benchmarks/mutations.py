"""Break one cure after the other, and check that its suite catches it: ``nox -s mutations [-- ID or CURE ...]``.

``mutations.toml`` lists the faults. Each is planted in a copy of the checkout; then, in the environment of a cell, the
issue's suite runs for the corrected trainer, or the project's own tests where no suite looks at what the fault changes.
A fault is caught when the suite gives the corrected trainer another verdict than without the fault, or when a test
fails that passes without it; a copy that cannot be imported catches nothing. Everything is first run without a fault,
and must then be right.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

from pytest_trlcompat.catalog.verdict import Record, read_records
from pytest_trlcompat.matrix.cells import Cell
from pytest_trlcompat.matrix.environments import Environment, ensure
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.locks import lock_for
from pytest_trlcompat.matrix.parsing import parse_pins
from pytest_trlcompat.matrix.sessions import Project

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_suffix(".toml")
COPIED = ("pytest_trlcompat", "suites", "fixtures", "tests", "pyproject.toml", "README.md", "noxfile.py", "docs")
TIMEOUT = 900.0
"""Seconds for one suite, or one file of tests, in one cell."""


@dataclass(frozen=True)
class Mutation:
    """A fault to plant.

    Attributes:
        file: below the checkout.
        old: text that occurs there exactly once.
        new: its replacement.
        cell: the pins of a cell that the issue affects, ``trl=0.15.2 transformers=4.48.3``.
        why: what the fault does.
        issue: whose suite must catch it.
        tests: or the tests that must, below the checkout.
    """

    file: str
    old: str
    new: str
    cell: str
    why: str
    issue: str = ""
    tests: str = ""

    @property
    def cure(self) -> str:
        return Path(self.file).stem

    def plant(self, checkout: Path) -> None:
        """
        Raises:
            MatrixError: when the text to replace does not occur there exactly once.
        """
        path = checkout / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise MatrixError(f"{self.file}: {self.old!r} occurs there {text.count(self.old)} times instead of once")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="issues or cures, a cure being a module's name; all by default")
    names = parser.parse_args().names
    mutations = [one for one in read_mutations() if not names or {one.issue, one.cure} & set(names)]
    if not mutations:
        print(f"no mutation for {', '.join(names)}", file=sys.stderr)
        return 2
    try:
        survivors = [one for one in mutations if not _is_caught(one)]
    except MatrixError as error:
        print(f"mutations: {error}", file=sys.stderr)
        return 2
    print(f"{len(mutations) - len(survivors)} of {len(mutations)} mutations caught")
    return 1 if survivors else 0


def read_mutations() -> list[Mutation]:
    with open(FAULTS, "rb") as file:
        return [Mutation(**entry) for entry in tomllib.load(file)["mutation"]]


def _is_caught(mutation: Mutation) -> bool:
    sound = _sound(mutation.cell, mutation.issue, mutation.tests)
    with _copy() as checkout:
        mutation.plant(checkout)
        found = _found(mutation.cell, mutation.issue, mutation.tests, checkout)
    judged = [f"{name} {found[name]}" for name in sound if name in found and found[name] != sound[name]]
    print(f"{'caught  ' if judged else 'SURVIVED'} {mutation.cure}, {mutation.cell}: {mutation.why}: ", end="")
    print(", ".join(judged) or "the verdicts stay", flush=True)
    return bool(judged)


_SOUND = {"ok", "absent", "untestable"}
"""Verdicts of what is whole; the cell lacks what the others need."""


@cache
def _sound(cell: str, issue: str, tests: str) -> dict[str, str]:
    """What is found without a fault."""
    with _copy() as checkout:
        found = _found(cell, issue, tests, checkout)
    if "ok" not in found.values() or set(found.values()) - _SOUND:
        what = {name: one for name, one in found.items() if one not in _SOUND} or found
        raise MatrixError(f"{issue or tests} in {cell}: without a fault everything must be ok, but there is {what}")
    return found


def _found(cell: str, issue: str, tests: str, checkout: Path) -> dict[str, str]:
    """The corrected trainer's verdict by strategy, or ``ok``, ``failed`` or ``absent`` by test."""
    results = checkout / "results"
    arguments = ["--trlcompat-issue", issue, "--trlcompat-subject", "corrected", "suites"] if issue else [tests]
    _run_pytest(cell, checkout, "--trlcompat-results", str(results), "--junit-xml", str(results) + ".xml", *arguments)
    return _by_strategy(read_records(results)) if issue else _by_test(results.with_suffix(".xml"))


def _run_pytest(cell: str, checkout: Path, *arguments: str) -> None:
    environment = _environment(cell)
    command = [str(environment.python), "-m", "pytest", "-p", "trlcompat", "-p", "no:cacheprovider", "-q", *arguments]
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON"))},
        **environment.variables,
        "PYTHONPATH": str(checkout),  # before the checkout that is installed there
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    with open(checkout / "pytest.log", "wb") as log:
        subprocess.run(command, cwd=checkout, env=variables, stdout=log, stderr=log, check=False, timeout=TIMEOUT)


def _by_test(report: Path) -> dict[str, str]:
    """Of pytest's JUnit report; a file that cannot be collected is no test."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        failed = any(case.find(kind) is not None for kind in ("failure", "error"))
        verdict = "failed" if failed else "ok" if case.find("skipped") is None else "absent"
        found[case.get("name", "")] = verdict
    return found


def _by_strategy(records: Sequence[Record]) -> dict[str, str]:
    return {record.strategy: record.verdict.value for record in records if record.subject == "corrected"}


@cache
def _environment(cell: str) -> Environment:
    project = _project()
    lock = lock_for(project.matrix, Cell(parse_pins(cell.split())), project.layout)
    return ensure(lock, project.layout)


@cache
def _project() -> Project:
    return Project(ROOT)


@contextmanager
def _copy() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="trlcompat-mutation-") as folder:
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, folder)
        yield Path(folder)


if __name__ == "__main__":
    sys.exit(main())
