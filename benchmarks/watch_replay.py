"""Replay the watch over a past, day by day, and hold what it reports against what the catalogue knows today.

    nox -s watch_replay -- [--first 2026-06-01] [--last 2026-08-01] [--plan] [--only DAY ...] [-- WATCH OPTIONS]

Each day on which something came out is asked with the index as it was then, the matrix and the catalogue cut back to
the day that was asked before. Days that are done are not run again, so that the command goes on where it stopped. With
``--plan`` nothing is run: the days, their releases, and what should be found.

What should be found follows from today's catalogue: the changes that a cell would show whose verdicts are all as it
predicts. *Missed* is what of that was not reported, as far as a suite gave a verdict; *not known today* is what was
reported and today's catalogue does not say, with what a bisection made of it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pytest_trlcompat._due import Account  # noqa: E402
from pytest_trlcompat.catalog import known_issues  # noqa: E402 - needs sys.path
from pytest_trlcompat.catalog.issue import SUBJECTS  # noqa: E402
from pytest_trlcompat.catalog.known_issues import Catalog  # noqa: E402
from pytest_trlcompat.catalog.verdict import Record  # noqa: E402
from pytest_trlcompat.matrix.files import write_whole  # noqa: E402
from pytest_trlcompat.matrix.parsing import read_matrix  # noqa: E402
from pytest_trlcompat.matrix.report.model import CellReport, Report  # noqa: E402
from pytest_trlcompat.matrix.results import TESTED, Sidecar  # noqa: E402
from pytest_trlcompat.stack import PACKAGES  # noqa: E402
from pytest_trlcompat.watch import cli  # noqa: E402
from pytest_trlcompat.watch import index as indexes  # noqa: E402
from pytest_trlcompat.watch.arguments import Options, parse  # noqa: E402
from pytest_trlcompat.watch.budget import Budget  # noqa: E402
from pytest_trlcompat.watch.changes import Change, changes_in, verdicts_of  # noqa: E402
from pytest_trlcompat.watch.index import Index  # noqa: E402
from pytest_trlcompat.watch.layout import WatchLayout  # noqa: E402
from pytest_trlcompat.watch.plan import WatchedCell, base_cell  # noqa: E402
from pytest_trlcompat.watch.session import Watch  # noqa: E402

Key = tuple[str, str, str, str, str]
"""Cell, issue, subject, strategy, kind."""


def days(index: Index, packages: Iterable[str], first: datetime.date, last: datetime.date) -> Iterator[datetime.date]:
    """The days after one on which something came out, each asked for the first time."""
    seen = {release.day + datetime.timedelta(days=1) for package in packages for release in index.releases[package]}
    yield from sorted(day for day in seen if first < day <= last)


def predicted(watched: WatchedCell, catalog: Catalog) -> CellReport:
    """A cell whose verdicts are all as a catalogue predicts."""
    records = []
    for issue in catalog.values():
        for subject in SUBJECTS:
            for strategy in issue.labels():
                found = issue.predict(subject, strategy, watched.stack)
                if found is not None:
                    evidence = {"blocked_by": found.by} if found.by else {}
                    records.append(Record(issue.id, subject, strategy, found.verdict, found.verdict, evidence))
    return CellReport(Sidecar(watched.cell.id, watched.cell.pins, TESTED, "", lock=watched.stack), tuple(records))


def expected(session: Watch, base: WatchedCell) -> list[Change]:
    """What the watch should report, by today's catalogue."""
    today = known_issues.load()
    cells = tuple(predicted(each, today) for each in (base, *session.plan))
    by_id = {cell.id: cell for cell in Report(cells).judged_by(session.catalog).cells}
    return changes_in(session.plan, by_id, verdicts_of(by_id[base.cell.id]))


def keys(changes: Iterable[Change]) -> dict[Key, str]:
    """Each verdict that changed, and a sentence about it."""
    return {
        (each.cell.cell.id, each.issue, each.subject, strategy, each.kind.value): each.sentence
        for each in changes
        for strategy in each.strategies
    }


def compare(session: Watch, wanted: Sequence[Change], found: Sequence[Change]) -> dict[str, list[Key]]:
    """What was to be found and was, what was missed, what today's catalogue does not say."""
    measured = {(cell.id, *record.key) for cell in session.reports().values() for record in cell.verdicts}
    want = {key: text for key, text in keys(wanted).items() if key[:4] in measured}
    have = keys(found)
    return {
        "found": sorted(set(want) & set(have)),
        "missed": sorted(set(want) - set(have)),
        "not_known_today": sorted(set(have) - set(want)),
    }


def main() -> int:
    """The program; 1 where something was missed, or a day was not asked or not measured as a whole."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=datetime.date.fromisoformat, default=datetime.date(2026, 6, 1))
    parser.add_argument("--last", type=datetime.date.fromisoformat, default=datetime.date(2026, 8, 1))
    parser.add_argument("--plan", action="store_true", help="run nothing")
    parser.add_argument("--only", action="append", type=datetime.date.fromisoformat, help="these days alone")
    parser.add_argument("watch", nargs="*", help="options of the watch, after --")
    options = parser.parse_args()
    index = indexes.ask(PACKAGES, "3.11", False)
    packages = parse(options.watch, options.last).packages
    previous, missed = options.first, 0
    asked = Account("days", options.only or days(index, packages, options.first, options.last))
    for day in days(index, packages, options.first, options.last):
        since, previous = previous, day
        if options.only and day not in options.only:
            continue
        one = parse([*options.watch, "--as-of", day.isoformat(), "--since", since.isoformat()], options.last)
        missed += replay(one, index, plan_only=options.plan)
        asked.meet(day)
    if not asked.is_complete:
        print(asked.shortfall(), file=sys.stderr)
    return 1 if missed or not asked.is_complete else 0


def replay(options: Options, index: Index, *, plan_only: bool) -> int:
    """One day; returns how much was missed, at least 1 where not all of its plan was measured."""
    layout = WatchLayout(ROOT, ROOT / "build" / "watch", options.scope.name)
    matrix = read_matrix(layout.matrix)
    session = Watch(matrix, layout, options, Budget(None, None, lambda: 0), lambda _: None, lambda *_: index)
    base = session.base or base_cell(matrix, layout, session.known)
    wanted = expected(session, base)
    print(f"{options.day}: {', '.join(map(str, session.new))}; cells: {', '.join(c.cell.id for c in session.plan)}")
    print(f"  held against {base.cell.id}; should be found: {len(keys(wanted))} verdicts")
    for change in wanted:
        print(f"    {change.kind}: {change.cell.about}: {change.sentence}")
    if plan_only:
        return 0
    started = time.monotonic()
    status = cli.watch(options, ROOT, lambda text: print(f"  {text}", flush=True), lambda *_: index)
    whole = session.outcome().is_complete or not session.new
    found = compare(session, wanted, session.changes(session.reports()))
    seconds = round(time.monotonic() - started)
    print(f"  {seconds} s; " + ", ".join(f"{name.replace('_', ' ')}: {len(each)}" for name, each in found.items()))
    for name in ("missed", "not_known_today"):
        for key in found[name]:
            print(f"    {name}: {', '.join(key)}")
    write_whole(layout.day(options.day) / "replay.json", json.dumps({"seconds": seconds, **found}, indent=1) + "\n")
    if status == cli.FAILED or not whole:
        print(f"  {options.day}: not all of its plan was measured, so that more may be missed")
        return len(found["missed"]) + 1
    return len(found["missed"])


if __name__ == "__main__":
    sys.exit(main())
