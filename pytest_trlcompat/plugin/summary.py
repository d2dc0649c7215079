"""The end of a pytest run in which suites gave verdicts: a test passes where upstream is broken as predicted.

Verdicts ride on the reports of their tests, so that they also arrive from the workers of pytest-xdist. Imports no
package of the stack, and nothing of the catalogue in a run without verdicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING

import pytest

from pytest_trlcompat import stack
from pytest_trlcompat.plugin import settings, trainings

if TYPE_CHECKING:
    from pytest_trlcompat.catalog.summary_parts import CellSummary, Line
    from pytest_trlcompat.catalog.verdict import Record

__all__ = ["pytest_terminal_summary"]

_MEASURED_AGAIN = "trlcompat-measured-again"
"""As :data:`pytest_trlcompat.plugin.judging.MEASURED_AGAIN`, which is not imported in a run without verdicts."""
_WIDTH = 80
_QUIETER_THAN_THIS = -1
"""``-qq`` asks for next to nothing: then the conclusion alone."""


# Outermost, so that it ends after the list of skipped and failed tests, and is what a person reads last.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Generator[None, None, None]:
    yield
    for why, count in _measured_again(terminalreporter).items():
        verdicts = "1 recorded verdict was" if count == 1 else f"{count} recorded verdicts were"
        terminalreporter.write_line(f"trlcompat: {verdicts} measured {why}, and measured again")
    _say_what_bites_trainings(terminalreporter)
    texts = list(_recorded(terminalreporter))
    if not texts:
        return
    from pytest_trlcompat._escaping import printable
    from pytest_trlcompat.catalog.summary import conclusion, screen
    from pytest_trlcompat.catalog.summary_parts import CellSummary
    from pytest_trlcompat.catalog.verdict import Record, RecordError

    newest: dict[tuple[str, str, str], Record] = {}
    for text in texts:
        try:
            record = Record.from_json(text)
        except RecordError as error:  # a property of this name that somebody else has recorded
            terminalreporter.write_line(printable(f"trlcompat: {error}"), red=True)
        else:
            newest[record.key] = record
    if not newest:
        return
    installed = stack.installed()
    name = ", ".join(f"{package} {installed[package]}" for package in ("trl", "transformers") if package in installed)
    cell = CellSummary(name or "this stack", installed.get("trl", ""), tuple(newest.values()))
    if config.get_verbosity() < _QUIETER_THAN_THIS:
        _write(terminalreporter, conclusion([cell]))
        return
    results = config.stash[settings.KEY].results.value
    where = str(results) if results else ""
    more = "" if where else "the evidence is kept with: --trlcompat-results FILE"
    terminalreporter.section("known issues")
    _write(terminalreporter, screen([cell], where=where, more=more, width=_WIDTH))
    _say_what_is_touched(terminalreporter, config.stash[settings.KEY].trainer.value, cell)


def _say_what_bites_trainings(reporter: pytest.TerminalReporter) -> None:
    issues = trainings.lines(reporter)
    if issues:
        from pytest_trlcompat._escaping import printable

        for line in issues:
            reporter.write_line(printable(f"trlcompat: {line}"))


def _say_what_is_touched(reporter: pytest.TerminalReporter, trainers: Iterable[str], cell: CellSummary) -> None:
    from pytest_trlcompat._escaping import printable
    from pytest_trlcompat._secrets import redacted
    from pytest_trlcompat.plugin import touched

    issues = touched.shown(cell.records)
    for trainer in trainers:
        reporter.write_line("")
        for line in touched.lines(trainer, issues):
            reporter.write_line(printable(redacted(line)))


def _recorded(reporter: pytest.TerminalReporter) -> Iterator[str]:
    """The verdicts on the reports, in the order of the tests; the phases of a test carry the same ones."""
    seen: set[str] = set()
    for reports in reporter.stats.values():
        for report in reports:
            for name, text in getattr(report, "user_properties", ()):
                if name == "trlcompat" and isinstance(text, str) and text not in seen:
                    seen.add(text)
                    yield text


def _measured_again(reporter: pytest.TerminalReporter) -> dict[str, int]:
    """Why recorded verdicts were not taken over, and of how many tests."""
    tests = {
        (report.nodeid, text)
        for reports in reporter.stats.values()
        for report in reports
        for name, text in getattr(report, "user_properties", ())
        if name == _MEASURED_AGAIN and isinstance(text, str)
    }
    return dict(Counter(why for _, why in sorted(tests)))


def _write(reporter: pytest.TerminalReporter, lines: Iterable[Line]) -> None:
    from pytest_trlcompat._escaping import printable

    for line in lines:
        for part in line:
            reporter.write(printable(part.text), **dict(map(_markup, part.style.split())))
        reporter.write_line("")


def _markup(word: str) -> tuple[str, bool]:
    """A word of a style as pytest calls it."""
    return {"magenta": "purple", "dim": "light"}.get(word, word), True
