"""Coverage of this project's own tests, ranks included: the commands of ``nox -s coverage`` around the tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

__all__ = ["JSON", "Total", "format_totals", "is_installed", "reporting_commands", "run_command", "totals"]

JSON = Path("build", "coverage", "coverage.json")
"""The report by file, relative to the checkout; pyproject.toml sets the same path."""


def is_installed(environment: Path) -> bool:
    """Whether a virtual environment has coverage."""
    return any(environment.glob("lib/python*/site-packages/coverage/"))


def run_command(pytest_arguments: list[str]) -> list[str]:
    """Run pytest with coverage. Each process writes its own data file, since pyproject.toml sets ``parallel``."""
    return ["python", "-m", "coverage", "run", "-m", "pytest", *pytest_arguments]


def reporting_commands() -> list[list[str]]:
    """Combine the data files of all processes, and write the reports."""
    coverage = ["python", "-m", "coverage"]
    return [[*coverage, "combine", "--quiet"], [*coverage, "html", "--quiet"], [*coverage, "json", "--quiet"]]


@dataclass(frozen=True)
class Total:
    """The coverage of one package; of modules directly in ``pytest_trlcompat`` or ``suites``, together."""

    name: str
    covered: int
    statements: int

    @property
    def percent(self) -> float:
        return 100 * self.covered / self.statements if self.statements else 100.0


def totals(report: Mapping[str, Any]) -> Iterator[Total]:
    """The totals of each package, and of all, from coverage's JSON report."""
    packages: dict[str, tuple[int, int]] = {}
    for name, file in report["files"].items():
        package = "/".join(PurePosixPath(name).parts[:-1][:2])
        covered, statements = packages.get(package, (0, 0))
        summary = file["summary"]
        packages[package] = covered + summary["covered_lines"], statements + summary["num_statements"]
    for package, counts in sorted(packages.items()):
        yield Total(package, *counts)
    yield Total("all", sum(c for c, _ in packages.values()), sum(s for _, s in packages.values()))


def format_totals(root: Path) -> str:
    """A table of the totals in the JSON report of a checkout."""
    report = json.loads((root / JSON).read_text(encoding="utf-8"))
    rows = [
        (total.name, str(total.covered), str(total.statements), f"{total.percent:.1f} %") for total in totals(report)
    ]
    header = ("package", "covered", "statements", "")
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in (header, *rows)
    )
