"""The program that merges what sweeps left behind, writes it in every form and prints it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_trlcompat._escaping import printable
from pytest_trlcompat._secrets import redacted
from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.matrix import shards
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.files import explained_os_errors, write_whole
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.report import explorer, hosted, junit, pages, publish, terminal, torch_comparison
from pytest_trlcompat.matrix.report.changes import Changes
from pytest_trlcompat.matrix.report.model import DAMAGED, Report, gather

__all__ = ["main", "write_all"]


def write_all(report: Report, results: Path, changes: Changes | None = None) -> list[Path]:
    """Write ``compat.json``, ``.md``, ``.html`` and ``.xml`` and return their paths."""
    changes = changes or Changes()
    torch = torch_comparison.compare(report.cells, report.columns)
    document = {
        **report.to_dict(),
        **({"torch_alone": torch.to_dict()} if torch.compared else {}),
        **({"since_published": changes.to_dict()} if changes.last else {}),
    }
    texts = {
        "compat.json": json.dumps(document, indent=1) + "\n",
        "compat.md": pages.markdown(report, changes),
        "compat.html": explorer.html(report, changes),
        "compat.xml": junit.junit(report),
    }
    for name, text in texts.items():
        write_whole(results / name, text)
    return [results / name for name in texts]


def main(arguments: Sequence[str] | None = None) -> int:
    """The program: write every form, print the summary; exit status 1 with a message where that cannot be done."""
    parser = argparse.ArgumentParser(
        prog="python -m pytest_trlcompat.matrix", description="Merge what sweeps left behind into a report."
    )
    parser.add_argument("results", type=Path, help="the folder that sweeps write to")
    parser.add_argument("--sweep", help="show only the cells of this sweep in the terminal")
    parser.add_argument("--tables", action="store_true", help="print a table for each known issue, no summary")
    parser.add_argument(
        "--publish", type=Path, metavar="CHECKOUT", help="write fixtures/evidence.json and the pages of docs/ there"
    )
    parser.add_argument(
        "--keep", action="store_true", help="publish the cells that were published before and were not run now as well"
    )
    parser.add_argument(
        "--pages", type=Path, metavar="CHECKOUT", help="only write the pages of docs/ anew, from fixtures/evidence.json"
    )
    parser.add_argument(
        "--summary", type=Path, metavar="FILE", help="append a short page in Markdown to it, as to $GITHUB_STEP_SUMMARY"
    )
    parser.add_argument(
        "--annotations", action="store_true", help="print what is not as predicted as workflow commands of GitHub"
    )
    parser.add_argument(
        "--history", type=Path, metavar="CHECKOUT", help="say what changed since the sweeps that were published there"
    )
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="DIR", help="first copy what parts of a sweep left there (--shard)"
    )
    parsed = parser.parse_args(arguments)
    try:
        with explained_os_errors():
            if parsed.pages:
                return _published(publish.write_pages(Layout(parsed.pages)))
            missing = ""
            if parsed.merge:
                print(f"merged: {shards.bring_together(parsed.merge, parsed.results)} cells")
                parts = shards.account_of_parts(parsed.merge, parsed.results)
                missing = parts.shortfall() if parts.due else ""
                if missing and parsed.publish:
                    raise MatrixError(f"not published: {missing}; run what is missing, and merge again")
            report = publish.with_boundaries(gather(parsed.results).judged_by(known_issues.load()))
            changes = Changes()
            if parsed.history:
                day = publish.last_day(parsed.results)
                changes = publish.since_published(report, Layout(parsed.history), day)
            paths = write_all(report, parsed.results, changes)
            if parsed.summary:
                hosted.append(hosted.summary_page(report, changes), parsed.summary)
            published = publish.publish(report, Layout(parsed.publish), keep=parsed.keep) if parsed.publish else []
    except MatrixError as error:
        print(printable(redacted(str(error))), file=sys.stderr)
        return 1
    for problem in changes.problems:
        print(printable(redacted(problem)), file=sys.stderr)
    shown = report.of_sweep(parsed.sweep) if parsed.sweep else report
    if parsed.tables:
        # Also cells of other sweeps are compared: those of today's torch, which had their own.
        terminal.show_tables(shown, paths, torch=torch_comparison.compare(report.cells, report.columns))
    else:
        terminal.show(shown, parsed.results / "compat.html", changes=changes)
    _published(published)
    if parsed.annotations:
        print("\n".join(hosted.workflow_commands(report)))
    damaged = [cell for cell in report.cells if cell.sidecar.state == DAMAGED]
    for cell in damaged:
        print(printable(str(cell.sidecar.reason)), file=sys.stderr)
    if missing:
        print(printable(f"the sweep is not whole: {missing}; run what is missing, and merge again"), file=sys.stderr)
    return 1 if damaged or missing else 0


def _published(paths: Sequence[Path]) -> int:
    folders = dict.fromkeys(path.parent for path in paths)
    for folder in folders:
        names = [path.name for path in paths if path.parent == folder]
        print(f"published: {folder / names[0]}" if len(names) == 1 else f"published: {len(names)} files in {folder}")
    return 0
