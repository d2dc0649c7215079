"""Break one cure after the other, and check that its suite catches it: ``nox -s mutations [-- ID or CURE ...]``.

``mutations.toml`` lists the faults. Each is planted in a copy of the checkout; then, in the environment of a cell, the
issue's suite runs for the corrected trainer, or the project's own tests where no suite looks at what the fault changes.
A fault is caught when the suite gives the corrected trainer another verdict than without the fault, or when a test
fails that passes without it; a copy that cannot be imported catches nothing. Everything is first run without a fault,
and must then be right.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from planting import copied_checkout, environment_of, outcomes_of_report, plant, run_pytest  # type: ignore[import-not-found]

from pytest_trlcompat.catalog.verdict import Record, read_records
from pytest_trlcompat.matrix.errors import MatrixError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FAULTS = Path(__file__).with_suffix(".toml")


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
    with copied_checkout() as checkout:
        plant(checkout, mutation.file, mutation.old, mutation.new)
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
    with copied_checkout() as checkout:
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
    return _by_strategy(read_records(results)) if issue else outcomes_of_report(results.with_suffix(".xml"))


def _run_pytest(cell: str, checkout: Path, *arguments: str) -> None:
    environment = environment_of(cell)
    variables = {**environment.variables, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run_pytest(environment.python, variables, checkout, "-p", "trlcompat", *arguments)


def _by_strategy(records: Sequence[Record]) -> dict[str, str]:
    return {record.strategy: record.verdict.value for record in records if record.subject == "corrected"}


if __name__ == "__main__":
    sys.exit(main())
