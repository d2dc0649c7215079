"""What a year of published sweeps costs: bytes, and the seconds that a report takes with and without them.

52 sweeps, one a week, as the published one, in each of which six verdicts of two cells are others than the week before.
``nox -s bench -- history [--runs N]``
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pytest_trlcompat import _data
from pytest_trlcompat.catalog.evidence import Evidence, load
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.matrix import history
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.report.changes import Changes, compare
from pytest_trlcompat.matrix.report.publish import report_of
from pytest_trlcompat.matrix.report.site import pages

WEEKS, CELLS, VERDICTS = 52, 2, 3


def year(published: Evidence, folder: Path) -> list[int]:
    """Write the sweeps, oldest first, and return the bytes of each."""
    chosen, sizes = random.Random(0), []
    first = datetime.date.fromisoformat(published.date) - datetime.timedelta(weeks=WEEKS)
    cells = list(published.cells)
    for week in range(WEEKS):
        for number in chosen.sample(range(len(cells)), CELLS):
            verdicts = dict(cells[number].verdicts)
            verdicts.update((key, chosen.choice(list(Verdict))) for key in chosen.sample(sorted(verdicts), VERDICTS))
            cells[number] = dataclasses.replace(cells[number], verdicts=verdicts)
        sweep = Evidence((first + datetime.timedelta(weeks=week)).isoformat(), tuple(cells))
        sizes.append(history.keep(sweep, folder).stat().st_size)
    return sizes


def seconds(run: Callable[[], object]) -> float:
    """Of this process alone, since the machine may be shared."""
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    layout = Layout(_data.fixtures().parent)
    published = load(layout.evidence)
    report = report_of(published)
    with tempfile.TemporaryDirectory() as name:
        sizes = year(published, Path(name))
        changes = compare(published, history.read(Path(name)))
        taken: dict[str, list[float]] = {}
        for _ in range(runs):  # one after the other, so that a slow moment slows all
            for what, run in {
                "read 52 sweeps": lambda: history.read(Path(name)),
                "read and compare": lambda: compare(published, history.read(Path(name))),
                "pages without them": lambda: pages(report, published, layout, Changes()),
                "pages with them": lambda: pages(report, published, layout, changes),
            }.items():
                taken.setdefault(what, []).append(seconds(run))
    verdicts = sum(len(cell.verdicts) for cell in published.cells)
    bytes_each = f"{min(sizes)} to {max(sizes)} bytes a sweep, {sum(sizes)} a year"
    print(f"{len(published.cells)} cells, {verdicts} verdicts: {bytes_each}")
    for what, each in taken.items():
        print(f"{what}: {statistics.median(each):.2f} s of processor time ({min(each):.2f} to {max(each):.2f})")


if __name__ == "__main__":
    main()
