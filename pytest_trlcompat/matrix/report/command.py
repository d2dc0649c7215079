"""The program that merges what sweeps left behind, writes it in every form and prints it.

Imports ``rich`` and ``jinja2``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.files import explained_os_errors, write_whole
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.report import junit, pages, publish, terminal, torch_comparison
from pytest_trlcompat.matrix.report.model import Report, gather

__all__ = ["main", "write_all"]


def write_all(report: Report, results: Path) -> list[Path]:
    """Write ``compat.json``, ``.md``, ``.html`` and ``.xml`` and return their paths."""
    torch = torch_comparison.compare(report.cells, report.columns)
    document = {**report.to_dict(), **({"torch_alone": torch.to_dict()} if torch.compared else {})}
    texts = {
        "compat.json": json.dumps(document, indent=1) + "\n",
        "compat.md": pages.markdown(report),
        "compat.html": pages.html(report),
        "compat.xml": junit.junit(report),
    }
    for name, text in texts.items():
        write_whole(results / name, text)
    return [results / name for name in texts]


def main(arguments: Sequence[str] | None = None) -> int:
    """The program: write every form, print the table; exit status 1 with a message where that cannot be done."""
    parser = argparse.ArgumentParser(
        prog="python -m pytest_trlcompat.matrix", description="Merge what sweeps left behind into a report."
    )
    parser.add_argument("results", type=Path, help="the folder that sweeps write to")
    parser.add_argument("--sweep", help="show only the cells of this sweep in the table")
    parser.add_argument(
        "--publish", type=Path, metavar="CHECKOUT", help="write fixtures/evidence.json and docs/compatibility.md there"
    )
    parser.add_argument(
        "--keep", action="store_true", help="publish the cells that were published before and were not run now as well"
    )
    parsed = parser.parse_args(arguments)
    try:
        with explained_os_errors():
            report = publish.with_boundaries(gather(parsed.results).judged_by(known_issues.load()))
            paths = write_all(report, parsed.results)
            published = publish.publish(report, Layout(parsed.publish), keep=parsed.keep) if parsed.publish else []
    except MatrixError as error:
        print(error, file=sys.stderr)
        return 1
    # Also cells of other sweeps are compared: those of today's torch, which had their own.
    torch = torch_comparison.compare(report.cells, report.columns)
    terminal.show(report.of_sweep(parsed.sweep) if parsed.sweep else report, paths, torch=torch)
    for path in published:
        print(f"published: {path}")
    return 0
