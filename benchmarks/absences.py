"""Plant what makes less be there than was due, and check that a test fails: ``nox -s absences [-- AREA ...]``.

``absences/*.toml`` lists the faults by area: a quantity that is not compared, a step that is skipped, an engine that is
left out, a swallowed error, an empty selection. Each is planted in a copy of the checkout, where the tests that must
fail run, in the environment that the entry names. A fault is found if one of them fails that passes without it. A test
that cannot be collected finds nothing, neither does one that is skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from planting import copied_checkout, environment_of, outcomes_of_report, plant, run_pytest  # type: ignore[import-not-found]

from pytest_trlcompat.matrix.errors import MatrixError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FAULTS = Path(__file__).with_suffix("")
MORE = ("benchmarks", "downstream", "evidence", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", ".github")
"""Of the checkout, what unit tests read beside what the suites need."""
CELLS = {"stack": "trl=1.16.0 transformers=5.23.0", "stack-old": "trl=0.17.0 transformers=4.50.3"}
UNIT = "unit"
"""Where tests run without a stack: in the interpreter that runs this."""


@dataclass(frozen=True)
class Absence:
    """A fault to plant.

    Attributes:
        area: the file that lists it.
        what: what the fault leaves out, in one sentence.
        file: below the checkout.
        old: text that occurs there exactly once; ``new``: its replacement.
        tests: pytest's node ids, of which at least one must fail.
        where: ``unit``, or a key of :data:`CELLS`.
    """

    area: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    where: str = UNIT


def read_absences(areas: Sequence[str] = ()) -> list[Absence]:
    """Every fault of the areas; of all of them by default."""
    absences = []
    for path in sorted(FAULTS.glob("*.toml")):
        if not areas or path.stem in areas:
            entries = tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
            absences += [Absence(path.stem, **{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
    return absences


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*", help="files of absences/, without their suffix; all by default")
    parser.add_argument("--where", choices=[UNIT, *CELLS], action="append", help="only faults that show there")
    arguments = parser.parse_args()
    absences = [
        absence for absence in read_absences(arguments.areas) if not arguments.where or absence.where in arguments.where
    ]
    if not absences:
        print(f"absences: no fault for {', '.join(arguments.areas)}; areas are {_areas()}", file=sys.stderr)
        return 2
    try:
        with copied_checkout(MORE) as checkout:
            sound: dict[tuple[str, ...], dict[str, str]] = {}
            missed = [absence for absence in absences if not _is_found(absence, checkout, sound)]
    except MatrixError as error:
        print(f"absences: {error}", file=sys.stderr)
        return 2
    print(f"{len(absences) - len(missed)} of {len(absences)} faults found")
    return 1 if missed else 0


def _areas() -> str:
    return ", ".join(path.stem for path in sorted(FAULTS.glob("*.toml")))


def _is_found(absence: Absence, checkout: Path, sound: dict[tuple[str, ...], dict[str, str]]) -> bool:
    """
    Args:
        sound: outcomes without a fault by place and tests, which is filled.
    """
    key = (absence.where, *absence.tests)
    if key not in sound:
        sound[key] = _outcomes(absence, checkout)
        if "ok" not in sound[key].values() or "failed" in sound[key].values():
            raise MatrixError(
                f"{', '.join(absence.tests)}: without a fault every test must pass, but there is {sound[key]}"
            )
    with _planted(absence, checkout):
        outcomes = _outcomes(absence, checkout)
    failed = [name for name, outcome in sound[key].items() if outcome == "ok" and outcomes.get(name) == "failed"]
    print(f"{'found   ' if failed else 'SURVIVED'} {absence.area}: {absence.what}: ", end="")
    print(", ".join(failed) or "no test fails", flush=True)
    return bool(failed)


@contextlib.contextmanager
def _planted(absence: Absence, checkout: Path) -> Iterator[None]:
    path = checkout / absence.file
    text = path.read_text(encoding="utf-8")
    plant(checkout, absence.file, absence.old, absence.new)
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def _outcomes(absence: Absence, checkout: Path) -> dict[str, str]:
    report = checkout / "report.xml"
    report.unlink(missing_ok=True)
    python, variables = Path(sys.executable), {}
    if absence.where != UNIT:
        environment = environment_of(CELLS[absence.where])
        python, variables = environment.python, environment.variables
    run_pytest(python, variables, checkout, "--junit-xml", str(report), *absence.tests)
    return outcomes_of_report(report)


if __name__ == "__main__":
    sys.exit(main())
