"""``trlcompat issue``: the page of a known issue in the terminal or in a browser, and known issues by words."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import textwrap
import webbrowser
from collections.abc import Iterator, Sequence
from typing import NoReturn

from pytest_trlcompat._escaping import encodable, visible
from pytest_trlcompat.catalog import evidence, known_issues, upstream_reports
from pytest_trlcompat.catalog.evidence import EvidenceError
from pytest_trlcompat.catalog.issue import KnownIssue
from pytest_trlcompat.catalog.known_issues import Catalog, CatalogError
from pytest_trlcompat.matrix.report import markdown
from pytest_trlcompat.matrix.report.issue_page import issue_page
from pytest_trlcompat.matrix.report.issue_search import Match, find, nearest_ids
from pytest_trlcompat.matrix.report.published import report_of
from pytest_trlcompat.matrix.report.torch_comparison import compare

__all__ = ["NOT_FOUND", "SHOWN", "UNUSABLE", "main", "page_of"]

SHOWN, NOT_FOUND, UNUSABLE = 0, 1, 2
"""Exit statuses: something was printed; there is no such known issue; the catalogue or the evidence cannot be read."""

_WIDTH = 120
"""The maximum width in columns, and the width when the output is not a terminal."""
_MOST = 20
"""Known issues that a search lists."""

_EPILOG = """\
examples:
  trlcompat issue grpo-logits-to-keep          its page: who is affected, how it shows, what cures it, what was measured
  trlcompat issue grpo-logits-to-keep --html   the same in the browser
  trlcompat issue grpo-positions --report      Markdown to paste upstream: a script without this package, and its output
  trlcompat issue --search lora save fsdp      known issues with these words in their id, title, symptom or error text
  trlcompat issue --search "mat1 and mat2 must have the same dtype"    an error's text, as it was printed

exit status: 0 if something was printed, 1 if there is no such known issue, 2 if the question cannot be answered
"""


def main(arguments: Sequence[str]) -> int:
    """Print a page or a list, and return the exit status."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if bool(parsed.id) == bool(parsed.search):
        parser.error("name one known issue, or ask with --search WORD ...; trlcompat doctor lists those of a stack")
    for option in ("html", "report"):
        if getattr(parsed, option) and parsed.search:
            parser.error(f"--{option} is about one known issue; --search lists several")
    if parsed.html and parsed.report:
        parser.error("--report is Markdown to paste; --html shows the page")
    try:
        known = known_issues.load()
        if parsed.search:
            return _search(" ".join(parsed.search), known)
        if parsed.id not in known:
            return _refused(_unknown(parsed.id, known), NOT_FOUND)
        if parsed.report:
            return _report(known[parsed.id])
        lines = page_of(known[parsed.id])
    except (CatalogError, EvidenceError) as error:
        return _refused(str(error), UNUSABLE)
    blocks = list(markdown.parse(lines))
    if not parsed.html:
        _print(markdown.as_text(blocks, _width()))
        return SHOWN
    try:
        path = _written(markdown.as_html(blocks, parsed.id), parsed.id)
    except OSError as error:
        return _refused(f"the page cannot be written: {error}", UNUSABLE)
    _print([path])
    sys.stdout.flush()  # a browser of the terminal takes it over
    _open(path)
    return SHOWN


def page_of(issue: KnownIssue) -> list[str]:
    """The lines of its page, Markdown, from the evidence that ships with this package.

    Raises:
        EvidenceError: it cannot be read.
    """
    published = evidence.published()
    report = report_of(published, issue.id)
    return list(issue_page(issue, report, published, compare(report.cells, report.columns)))


def _report(issue: KnownIssue) -> int:
    try:
        _print(upstream_reports.stored_report(issue).splitlines())
    except FileNotFoundError as error:
        return _refused(str(error), NOT_FOUND)
    return SHOWN


def _search(asked: str, known: Catalog) -> int:
    matches = find(asked, known.values())
    if not matches:
        return _refused(
            f"no known issue has the words {asked!r} in its id, title, symptom or error text; try fewer words, or one "
            "that is particular to it",
            NOT_FOUND,
        )
    number = f"{len(matches)} known issues" if len(matches) > 1 else "1 known issue"
    _print([f"{number} for {visible(asked)!r}; trlcompat issue ID prints the page of one", "", *_listed(matches)])
    return SHOWN


def _listed(matches: Sequence[Match]) -> Iterator[str]:
    width = _width()
    for match in matches[:_MOST]:
        error = " (this is the text of its error)" if match.is_error else ""
        text = f"{match.issue.id}: {match.issue.title}{error}"
        yield from textwrap.wrap(text, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    if (more := len(matches) - _MOST) > 0:
        yield f"and {more} more; another word would leave out some"


def _unknown(asked: str, known: Catalog) -> str:
    near = nearest_ids(asked, known)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return f"there is no known issue {asked!r}; {meant}trlcompat issue --search WORD ... finds by words"


def _written(page: str, issue_id: str) -> str:
    """A file of this user's alone, which stays until the folder for temporary files is emptied."""
    descriptor, path = tempfile.mkstemp(prefix=f"trlcompat-{issue_id}-", suffix=".html")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(page)
    return path


def _open(path: str) -> None:
    """Show it in a browser. Where there is none, the path that was printed is the answer."""
    try:
        webbrowser.open(f"file://{path}")
    except (webbrowser.Error, OSError) as error:
        print(encodable(f"trlcompat issue: no browser could be started: {error}", sys.stderr.encoding), file=sys.stderr)


def _width() -> int:
    return min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns) if sys.stdout.isatty() else _WIDTH


def _print(lines: Iterator[str] | Sequence[str]) -> None:
    sys.stdout.write(encodable("".join(f"{visible(line)}\n" for line in lines), sys.stdout.encoding))


def _refused(text: str, status: int) -> int:
    print(encodable(visible(f"trlcompat issue: {text}"), sys.stderr.encoding), file=sys.stderr)
    return status


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(visible(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="trlcompat issue",
        description="Prints what is known about a known issue, or finds known issues. Runs nothing.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("id", nargs="?", metavar="ID", help="a known issue, by the id that the doctor prints")
    parser.add_argument(
        "--html",
        action="store_true",
        help="write its page to a temporary file that only you can read, print the path, and open it in the browser",
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="print Markdown to paste upstream: a script that shows it without this package, and what that printed",
    )
    parser.add_argument(
        "--search",
        nargs="+",
        metavar="WORD",
        help="list the known issues with these words, the best match first; an error's text is a search too",
    )
    return parser
