"""A diagnosis for people: plain text, in colours where ``rich`` is installed and there is a terminal.

Imports no package of the stack; ``rich`` only when it is used, and never needs it.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from pytest_trlcompat.catalog.known_issues import STRATEGIES
from pytest_trlcompat.doctor.diagnosis import Bite, Diagnosis, Finding, Pins
from pytest_trlcompat.doctor.given import ORDER

__all__ = ["show"]

_WIDTH = 120
"""Columns at most, and where there is no terminal."""
_INDENT = 2
_LABEL = 11

Line = tuple[str, str]
"""A style of rich's and a text."""


def show(diagnosis: Diagnosis, file: IO[str]) -> None:
    """Print it."""
    terminal = file.isatty()
    lines = list(_lines(diagnosis, min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns) if terminal else _WIDTH))
    if terminal:
        try:
            from rich.console import Console
            from rich.text import Text
        except ImportError:
            pass
        else:
            console = Console(file=file, highlight=False)
            for style, text in lines:
                console.print(Text(text, style=style), soft_wrap=True)
            return
    file.write("".join(f"{text}\n" for _, text in lines))


def _lines(diagnosis: Diagnosis, width: int) -> Iterator[Line]:
    yield from _wrapped("", _stack(diagnosis), width)
    for note in diagnosis.given.notes:
        yield from _wrapped("yellow", f"note: {note}", width)
    if diagnosis.left_out:
        yield from _wrapped("", f"not considered: {diagnosis.left_out}", width)
    if diagnosis.torch:
        yield from _wrapped("yellow", f"torch: {diagnosis.torch}", width)
    yield "", ""
    yield from _summary(diagnosis, width)
    hidden = {finding.issue.id: by for finding in diagnosis.findings if (by := diagnosis.hidden_by(finding))}
    for finding in diagnosis.findings:
        if finding.issue.id not in hidden:
            yield "", ""
            yield from _finding(finding, width)
    if hidden:
        yield "", ""
    for name, by in hidden.items():
        verb = "stops" if len(by) == 1 else "stop"
        yield from _wrapped("", f"{name} cannot be seen: {' and '.join(by)} {verb} it first.", width)
    if diagnosis.findings:
        yield "", ""
        yield from _advice(diagnosis, width)


def _stack(diagnosis: Diagnosis) -> str:
    given = diagnosis.given
    texts = ", ".join(f"{package} {text}" for package, text in given.texts.items())
    unnamed = [package for package in ORDER if package not in given.texts]
    parts = [f"{texts} ({given.source})"]
    if unnamed:
        parts.append(f"{'not installed' if unnamed == given.absent else 'not given'}: {', '.join(unnamed)}")
    return "; ".join(parts)


def _finding(finding: Finding, width: int) -> Iterator[Line]:
    issue = finding.issue
    yield from _wrapped("bold red", f"{issue.id}: {issue.title}", width)
    for bite in finding.bites:
        yield from _entry(bite.verdict.value, _bite(bite), width)
    yield from _entry("symptom", issue.wrong, width)
    yield from _entry("cure", issue.remedy, width, style="green")
    if finding.uncured:
        yield from _entry("but", f"the corrected trainer is {finding.uncured}", width)
    for number, link in enumerate(issue.upstream):
        yield from _entry("upstream" if not number else "", link, width)


def _bite(bite: Bite) -> str:
    only = f", only with {bite.condition}" if bite.condition else ""
    why = f"{bite.by} stops it first: {bite.why}" if bite.by else bite.why
    return f"{_under(bite.strategies).strip() or 'under every strategy'}{only}: {why} [{bite.sure.describe()}]"


def _summary(diagnosis: Diagnosis, width: int) -> Iterator[Line]:
    if diagnosis.findings:
        hidden = sum(bool(diagnosis.hidden_by(finding)) for finding in diagnosis.findings)
        unseen = f"; {hidden} of them cannot be seen" if hidden else ""
        yield from _wrapped("bold", f"{_issues(len(diagnosis.findings))}{unseen}.", width)
    else:
        near = f"; the nearest measured cell is {diagnosis.nearest.id}" if diagnosis.nearest else ""
        yield from _wrapped("bold green", f"No known issue bites{near}.", width)
    if diagnosis.untold:
        yield from _wrapped("", f"The catalogue says nothing of {', '.join(diagnosis.untold)} for this stack.", width)


def _advice(diagnosis: Diagnosis, width: int) -> Iterator[Line]:
    for pins in diagnosis.pins:
        yield from _wrapped("", _pins(pins), width)
    if not any(pins.strategies == diagnosis.strategies for pins in diagnosis.pins):
        under = _under(diagnosis.strategies) or " under every strategy"
        sweep = f"the sweep of {diagnosis.measured}" if diagnosis.measured else "any sweep"
        narrow = "" if diagnosis.pins else "; --strategy and --trainer leave out what you do not use"
        yield from _wrapped("", f"No cell of {sweep} is ok for all issues{under}{narrow}.", width)


def _pins(pins: Pins) -> str:
    versions: Mapping[str, str] = pins.cell.versions
    exact = " ".join(f"{package}=={versions[package]}" for package in ORDER[:2] if package in versions)
    beside = ", ".join(f"{package} {versions[package]}" for package in ORDER[2:] if package in versions)
    under = _under(pins.strategies) or " under every strategy"
    return f"Nearest measured pins, ok for all issues{under}: {exact}" + (beside and f" (with {beside})")


def _under(strategies: Sequence[str]) -> str:
    """Nothing for every strategy, which is what one reads where none is named."""
    return "" if set(STRATEGIES) <= set(strategies) else f" under {', '.join(strategies)}"


def _issues(number: int) -> str:
    return "1 known issue bites" if number == 1 else f"{number} known issues bite"


def _entry(label: str, text: str, width: int, style: str = "") -> Iterator[Line]:
    margin = " " * (_INDENT + _LABEL)
    first = " " * _INDENT + label.ljust(_LABEL)
    yield from ((style, line) for line in _fill(text, width, first, margin))


def _wrapped(style: str, text: str, width: int) -> Iterator[Line]:
    yield from ((style, line) for line in _fill(text, width, "", " " * _INDENT))


def _fill(text: str, width: int, first: str, margin: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )
