"""Break one cure after the other, and check that its suite catches it: ``nox -s mutations [-- ID or CURE ...]``.

``mutations.toml`` lists the faults. Each is planted in a copy of the checkout; then the issue's suite runs for the
corrected trainer in the environment of a cell with the bug. A fault is caught when the suite gives the corrected
trainer another verdict than without the fault; that a test failed is not enough, since a copy that cannot be imported
fails too. Every suite is first run without a fault, and must then find the corrected trainer right.
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
COPIED = ("pytest_trlcompat", "suites", "fixtures")
TIMEOUT = 600.0
"""Seconds for one suite in one cell."""


@dataclass(frozen=True)
class Mutation:
    """A fault to plant.

    Attributes:
        file: below the checkout.
        old: text that occurs there exactly once.
        new: its replacement.
        issue: whose suite must catch it.
        cell: the pins of a cell that the issue affects, ``trl=0.15.2 transformers=4.48.3``.
        why: what the fault does.
    """

    file: str
    old: str
    new: str
    issue: str
    cell: str
    why: str

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
    parser.add_argument("names", nargs="*", help="issues or cures; all by default")
    names = parser.parse_args().names
    mutations = [one for one in _read() if not names or {one.issue, one.cure} & set(names)]
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


def _read() -> list[Mutation]:
    with open(FAULTS, "rb") as file:
        return [Mutation(**entry) for entry in tomllib.load(file)["mutation"]]


def _is_caught(mutation: Mutation) -> bool:
    sound = _verdicts_without_fault(mutation.cell, mutation.issue)
    with _copy() as checkout:
        mutation.plant(checkout)
        found = _verdicts(mutation.cell, mutation.issue, checkout)
    changed = [f"{strategy} {found[strategy]}" for strategy in sound if found.get(strategy, "none") != sound[strategy]]
    judged = [change for change in changed if not change.endswith(" none")]
    print(f"{'caught  ' if judged else 'SURVIVED'} {mutation.cure}, {mutation.cell}: {mutation.why}: ", end="")
    print(", ".join(judged) or "the verdicts stay", flush=True)
    return bool(judged)


@cache
def _verdicts_without_fault(cell: str, issue: str) -> dict[str, str]:
    with _copy() as checkout:
        found = _verdicts(cell, issue, checkout)
    if not any(verdict == "ok" for verdict in found.values()) or set(found.values()) - {"ok", "absent"}:
        raise MatrixError(f"{issue} in {cell}: without a fault the corrected trainer must be ok, but gives {found}")
    return found


def _verdicts(cell: str, issue: str, checkout: Path) -> dict[str, str]:
    """The corrected trainer's verdict by strategy."""
    results = checkout / "verdicts.jsonl"
    environment = _environment(cell)
    command = [
        *(str(environment.python), "-m", "pytest", "-p", "trlcompat", "-p", "no:cacheprovider", "-q"),
        *(
            "--trlcompat-results",
            str(results),
            "--trlcompat-issue",
            issue,
            "--trlcompat-subject",
            "corrected",
            "suites",
        ),
    ]
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON"))},
        **environment.variables,
        "PYTHONPATH": str(checkout),  # before the checkout that is installed there
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    with open(checkout / "pytest.log", "wb") as log:
        subprocess.run(command, cwd=checkout, env=variables, stdout=log, stderr=log, check=False, timeout=TIMEOUT)
    return _by_strategy(read_records(results))


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
            shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
        yield Path(folder)


if __name__ == "__main__":
    sys.exit(main())
