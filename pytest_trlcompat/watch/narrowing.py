"""Goes on to bisect what nothing predicts: which package, which release, and with a clone which commit.

The bisection is a program of its own, so that it ends with everything that it has started.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_trlcompat._provenance import Provenance, difference
from pytest_trlcompat._secrets import redacted
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.matrix import process
from pytest_trlcompat.matrix.files import write_whole
from pytest_trlcompat.matrix.suite_run import code_digest
from pytest_trlcompat.watch.changes import Change, Kind
from pytest_trlcompat.watch.known import Known
from pytest_trlcompat.watch.layout import WatchLayout

__all__ = ["Narrowed", "command_for", "narrow", "read_narrowed"]

_OF_ITS_STEPS = "steps"
"""Stands for the packages of a bisection: each of its steps has others, which its journal keeps apart by locks."""

_LINES = 4
"""Of the end of a bisection's output, where it found nothing."""


@dataclass(frozen=True)
class Narrowed:
    """What a bisection found.

    Attributes:
        verdict: its headline: ``trl 1.17.0 broke grpo-loss (...)``; empty where it found nothing.
        package, before, after: the culprit, its last release that is not changed, and the first that is.
        between: how many between these two are inconclusive.
        report: Markdown to paste upstream; empty where it found nothing.
        reason: why it found nothing.
        command: repeats it.
    """

    command: str
    verdict: str = ""
    package: str = ""
    before: str = ""
    after: str = ""
    between: int = 0
    report: str = ""
    reason: str = ""

    @property
    def found(self) -> bool:
        return bool(self.verdict)


def command_for(
    change: Change, known: Known, day: datetime.date, clones: Sequence[str], folder: Path
) -> list[str] | str:
    """The arguments of ``trlcompat bisect`` that find what a change comes from, or why there are none."""
    if change.kind is Kind.CHANGED:
        return "it was a problem before as well, of another kind, which a search for good and bad does not tell apart"
    if change.subject == "corrected":
        return "a bisection runs TRL's own trainer, and this is the corrected one"
    release, commit, before = change.cell.release, change.cell.commit, change.cell.previous
    if release is not None and not before:
        return f"no older release of {release.package} is known"
    named = [word for clone in clones for word in ("--clone", clone)]
    others = [f"{name}={version}" for name, version in change.cell.stack.items() if name != change.cell.package]
    if release is None:
        # Several releases are new in this cell: the search is over days, which names the package as well.
        where, good, bad = ["days"], known.base.date.isoformat(), day.isoformat()
    elif commit is None:
        where = ["releases", "--package", release.package, "--rest", "fixed", "--with", *others]
        good, bad = before, release.version
    else:
        try:
            good, bad = commit.clone.tag_of(before), commit.commit.sha
        except BisectError as error:
            return str(error)
        # Commits hide the release in the environment; what it requires is installed with it.
        others = [f"{commit.package}={before}", *others]
        where = ["commits", "--package", commit.package, "--allow-dirty", "--with", *others]
        named = ["--clone", str(commit.clone.path)]
    ends = ["--good", good, "--bad", bad]
    if change.kind is Kind.CURED:
        # For a cure the earlier end is the bad one.
        ends = ["--good", bad, "--bad", good, "--find-fix"]
    return [
        *where,
        *ends,
        *("--issue", change.issue, "--strategy", change.record.strategy),
        *named,
        *("--state", str(folder), "--json", str(_json(folder, change)), "--report", str(_report(folder, change))),
    ]


def narrow(
    change: Change,
    arguments: Sequence[str],
    layout: WatchLayout,
    say: Callable[[str], None],
) -> Narrowed:
    """Run a bisection to its end, or read what an earlier one has found; one that found nothing runs again.

    Raises:
        KeyboardInterrupt: when stopped, or out of time; every finished step is kept.
    """
    folder = layout.bisections
    narrowed = read_narrowed(change, folder, code_digest(layout))
    if narrowed is not None and narrowed.found:
        # One that found nothing is tried again: it may have been the network, or the disk.
        return narrowed
    command = [sys.executable, "-m", "pytest_trlcompat.bisect", *arguments]
    shown = f"trlcompat bisect {' '.join(_public(arguments))}"
    say(f"bisects: {change.sentence}")
    log = folder / f"{change.key}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # What is there is of other code, or of a search that found nothing.
    _json(folder, change).unlink(missing_ok=True)
    with open(log, "wb") as output:
        status = process.run(command, env=dict(os.environ), cwd=layout.root, output=output)
    # Only now: a result without it is not believed, so that a bisection that was stopped has found nothing.
    write_whole(_code(folder, change), code_digest(layout) + "\n")
    narrowed = read_narrowed(change, folder, code_digest(layout)) if status == 0 else None
    if narrowed is None:
        narrowed = Narrowed(shown, reason=_end_of(log) or f"it ended with exit status {status}")
        write_whole(_json(folder, change), json.dumps({"command": shown, "reason": narrowed.reason}) + "\n")
    return narrowed


def read_narrowed(change: Change, folder: Path, code: str) -> Narrowed | None:
    """What an earlier bisection of this change found, or why nothing; ``None`` if none with this code has ended.

    Args:
        code: of :func:`pytest_trlcompat.matrix.suite_run.code_digest`. Its steps' packages are in their locks.
    """
    try:
        recorded = _code(folder, change).read_text(encoding="utf-8").strip()
        if difference(Provenance(recorded, _OF_ITS_STEPS), Provenance(code, _OF_ITS_STEPS)):
            return None
        raw: Mapping[str, Any] = json.loads(_json(folder, change).read_text(encoding="utf-8"))
        if "reason" in raw:
            return Narrowed(str(raw["command"]), reason=str(raw["reason"]))
        culprit = raw["culprit"]
        before, after = ("last_bad", "first_good") if "last_bad" in culprit else ("last_good", "first_bad")
        report = _report(folder, change)
        return Narrowed(
            command=str(raw["command"]),
            verdict=str(raw["verdict"]),
            package=str(culprit["package"] or ""),
            before=str(culprit[before]),
            after=str(culprit[after]),
            between=len(culprit["inconclusive"]),
            report=report.read_text(encoding="utf-8") if report.is_file() else "",
        )
    except (OSError, ValueError, KeyError, TypeError):
        # Damaged, or of another release: the search is run again.
        return None


def _public(arguments: Sequence[str]) -> Iterable[str]:
    """Without the options that name this machine's files."""
    words = iter(arguments)
    for word in words:
        if word in ("--state", "--json", "--report"):
            next(words)
        else:
            yield word


def _json(folder: Path, change: Change) -> Path:
    return folder / f"{change.key}.json"


def _code(folder: Path, change: Change) -> Path:
    """The file with the digest of the code that a bisection ran with."""
    return folder / f"{change.key}.code"


def _report(folder: Path, change: Change) -> Path:
    return folder / f"{change.key}.md"


def _end_of(log: Path) -> str:
    text = redacted(log.read_text(encoding="utf-8", errors="replace"))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-_LINES:])
