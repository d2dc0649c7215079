"""Break one cure after the other, and check that its suite catches it: ``nox -s mutations [-- ID or CURE ...]``.

``mutations/`` lists the faults, a file for each folder: the topics of cures, their engine, the reference. A cure for
which none is written has one all the same: it is left out of every kind of trainer. Each is planted in a copy of the
checkout; then, in the environment of a cell, the issue's suite runs for the corrected trainer, or the project's own
tests where no suite looks at what the fault changes. A fault is caught when the suite gives the corrected trainer
another verdict than without the fault, or when a test fails that passes without it; a copy that cannot be imported
catches nothing. Everything is first run without a fault, and must then be right.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from planting import ROOT, copied_checkout, environment_of, outcomes_of_report, plant, run_pytest  # type: ignore[import-not-found]

from pytest_trlcompat.catalog import evidence, known_issues
from pytest_trlcompat.catalog.issue import KnownIssue
from pytest_trlcompat.catalog.verdict import Record, Verdict, read_records
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.parsing import read_matrix
from pytest_trlcompat.trainers.curing import known
from pytest_trlcompat.trainers.curing.names import MODULES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FAULTS = Path(__file__).with_suffix("")
_NEEDED = (Verdict.BROKEN, Verdict.SILENT, Verdict.WASTEFUL)
"""What a suite says of upstream where a cure is needed."""


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
        cure: the module of the cure, by the last part of its name; by default that of the file.
    """

    file: str
    old: str
    new: str
    cell: str
    why: str
    issue: str = ""
    tests: str = ""
    cure: str = ""

    def __post_init__(self) -> None:
        if not self.cure:
            object.__setattr__(self, "cure", Path(self.file).stem)


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
    """Those that are written, and for each cure without one that which leaves it out.

    Raises:
        MatrixError: nothing is written for a cure, and no published cell shows that it is needed.
    """
    written = [mutation for path in sorted(FAULTS.glob("*.toml")) for mutation in _read(path)]
    cures = {mutation.cure for mutation in written}
    mixins = [name for name in MODULES if name.endswith("Mixin") and _module_of(name) not in cures]
    return [*written, *map(leaving_out, mixins)]


def _read(path: Path) -> list[Mutation]:
    with open(path, "rb") as file:
        document = tomllib.load(file)
    return [Mutation(**{**entry, "file": f"{document['folder']}/{entry['file']}"}) for entry in document["mutation"]]


def _module_of(mixin: str) -> str:
    return MODULES[mixin].rpartition(".")[2]


def leaving_out(mixin: str) -> Mutation:
    """The fault that no kind of trainer gets a cure, in the newest published cell that needs it, a default one if any.

    Raises:
        MatrixError: the catalogue says of no such cell that an issue of this cure shows there.
    """
    issues, matrix = known_issues.load(), read_matrix(ROOT / "fixtures" / "matrix.toml")
    cells = {cell.id: cell for cell in evidence.published().cells}
    for cell in (*reversed(matrix.default()), *reversed(matrix.full())):
        for issue in (issues[cured.id] for cured in known.issues_of(mixin)):
            if cell.id in cells and _is_needed(issue, cells[cell.id].versions):
                return Mutation(
                    # Not in the module of the cure: others say that they stand behind it.
                    file="pytest_trlcompat/trainers/curing/compose.py",
                    old="if mixin not in {*left_out, *have}",
                    new=f'if mixin not in {{*left_out, *have, "{mixin}"}}',
                    cell=" ".join(f"{package}={version}" for package, version in cell.pins.items()),
                    why=f"leaves {mixin} out",
                    issue=issue.id,
                    cure=_module_of(mixin),
                )
    raise MatrixError(f"{mixin}: no published cell shows that it is needed; write a fault into {FAULTS.name}/")


def _is_needed(issue: KnownIssue, versions: Mapping[str, str]) -> bool:
    """Whether under one of its strategies upstream shows it with these versions, and the corrected trainer does not."""
    for label in issue.labels():
        upstream = issue.predict("upstream", label, versions)
        corrected = issue.predict("corrected", label, versions)
        if upstream and upstream.verdict in _NEEDED and corrected and corrected.verdict is Verdict.OK:
            return True
    return False


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
