"""The program: its messages, its files, its exit status."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pytest_trlcompat._escaping import printable
from pytest_trlcompat._secrets import redacted, redacted_values
from pytest_trlcompat.matrix import disk
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.files import explained_os_errors, locked, write_whole
from pytest_trlcompat.matrix.parsing import read_matrix
from pytest_trlcompat.matrix.process import signals_as_ctrl_c
from pytest_trlcompat.watch import index as indexes
from pytest_trlcompat.watch import page
from pytest_trlcompat.watch.arguments import Options, parse
from pytest_trlcompat.watch.budget import Budget
from pytest_trlcompat.watch.layout import WatchLayout
from pytest_trlcompat.watch.outcome import Outcome
from pytest_trlcompat.watch.session import Watch

__all__ = ["FAILED", "main", "watch"]

_ROOT = Path(__file__).resolve().parents[2]
# The last is 128 and the number of SIGINT, as shells have it.
_AS_PREDICTED, _CHANGED, FAILED, _INTERRUPTED = 0, 1, 2, 130


def main(words: Sequence[str] | None = None) -> int:
    """Run a command line.

    Returns:
        0 where all of the plan was measured and is as predicted, or nothing is new; 1 where something is not as
        predicted; 2 where that could not be found out, since something of the plan is missing.
    """
    try:
        options = parse(sys.argv[1:] if words is None else words, _today())
        with explained_os_errors(), signals_as_ctrl_c():
            return watch(options, _ROOT, _say)
    except MatrixError as error:
        print(printable(redacted(f"watch: {error}")), file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("\nwatch: stopped; every finished step is kept, and the same command goes on", file=sys.stderr)
        return _INTERRUPTED


def watch(options: Options, root: Path, say: Callable[[str], None], ask: indexes.Ask = indexes.ask) -> int:
    """Do what the options ask for, in a checkout; returns the exit status."""
    folder = root / "build" / "watch"
    layout = WatchLayout(root, folder, options.scope.name)
    budget = Budget(options.minutes, options.gigabytes, lambda: disk.available(layout))
    session = Watch(read_matrix(layout.matrix), layout, options, budget, say, ask)
    new = [*session.new, *(commit.release for commit in session.commits)]
    for line in session.not_built:
        say(line)
    if not new and session.not_built:
        return FAILED
    if nothing_asked := session.nothing_asked:
        raise MatrixError(f"what is new cannot be said: {nothing_asked}")
    if not new:
        say(f"nothing new as of {options.day}: nothing newer than what was measured of {', '.join(options.packages)}")
        return _AS_PREDICTED
    say(f"new as of {options.day}: {', '.join(f'{release} ({release.day})' for release in new)}")
    with locked(folder / f".{options.scope.name}.lock", lambda: say("the same watch is running already; waiting")):
        if options.list_only:
            for watched in session.plan:
                moved = f", with {', '.join(watched.moved)}" if watched.moved else ""
                say(f"  {watched.cell.id}: {watched.about}{moved}")
            return _AS_PREDICTED
        outcome = session.run()
        files = write(outcome, layout.day(options.day))
    _tell(outcome, say)
    for path in files:
        say(f"  {path.relative_to(root)}")
    if outcome.causes:
        return _CHANGED
    return _AS_PREDICTED if outcome.is_complete else FAILED


def write(outcome: Outcome, folder: Path) -> list[Path]:
    """Write a day's page, its JSON, the patch, and a text to paste upstream for each cause; returns their paths."""
    texts = {
        "report.md": page.markdown(outcome),
        "report.html": page.html(outcome),
        "report.json": json.dumps(redacted_values(outcome.to_json()), indent=1) + "\n",
    }
    if outcome.patch:
        texts["changes.patch"] = outcome.patch
    for cause in outcome.causes:
        if text := page.to_paste(cause):
            texts[f"upstream/{cause.first.key}.md"] = text
    for name, text in texts.items():
        write_whole(folder / name, text)
    return [folder / name for name in texts]


def _tell(outcome: Outcome, say: Callable[[str], None]) -> None:
    say(outcome.summary)
    for cause in outcome.causes:
        verdict = cause.narrowed.verdict if cause.narrowed is not None and cause.narrowed.found else ""
        for change in cause.changes:
            say(f"  {change.kind}: {change.cell.about}: {change.sentence}")
        if verdict:
            say(f"    {verdict}")
    for line in outcome.left:
        say(f"  not reached: {line}")
    if not outcome.is_complete:
        say("not all of the plan was measured; the same command goes on with what is missing")


def _say(text: str) -> None:
    print(printable(redacted(text)), flush=True)


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.timezone.utc).date()
