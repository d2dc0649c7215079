"""Publishing a sweep: the evidence that ships with the package, and the pages that people read, made from it.

``fixtures/evidence.json`` holds the versions and verdicts of each cell; the pages follow from it, from what was
published before (:mod:`pytest_trlcompat.matrix.history`), and from the catalogue.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from pytest_trlcompat._due import Account
from pytest_trlcompat._provenance import Provenance, difference
from pytest_trlcompat.catalog import boundaries, known_issues
from pytest_trlcompat.catalog.evidence import Evidence, EvidenceError, load
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.verdict import Record, Verdict
from pytest_trlcompat.matrix import history
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.files import write_whole
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.report import site
from pytest_trlcompat.matrix.report.changes import Changes, compare
from pytest_trlcompat.matrix.report.model import CellReport, Report, evidence_of, merge
from pytest_trlcompat.matrix.report.published import report_of
from pytest_trlcompat.matrix.results import UNTESTABLE
from pytest_trlcompat.matrix.shards import keep_seconds
from pytest_trlcompat.stack import versions_of

__all__ = [
    "last_day",
    "pages_of_evidence",
    "publish",
    "remove_old_issues",
    "report_of",
    "since_published",
    "with_boundaries",
    "write_pages",
]


def publish(report: Report, layout: Layout, *, keep: bool = False) -> list[Path]:
    """Write the evidence and the pages, and return their paths.

    Args:
        keep: publish the evidence that stands there as well: its cells that ``report`` has not, and of those that it
            has with the same versions of the stack what was not run anew. All of it is held against the catalogue as
            it is now, and says with which code and packages it was measured, and when.

    What was published on an earlier day is kept in ``evidence/``; of one day the last sweep alone counts.

    Raises:
        MatrixError: a verdict is not as predicted, a cell was cut short, or was measured with several versions of this
            project or several sets of packages: such a sweep is not fit to be relied upon; or there is nothing to
            publish, or a newer one was published already.
    """
    before = _load(layout) if keep else _standing(layout)
    # With nothing anew, what was published is held against the catalogue as it is now.
    if report.cells or not keep:
        _check_sources(report)
    if keep:
        report = _with_kept(report, report_of(before)).judged_by(known_issues.load())
    if report.wrong:
        cell, record = report.wrong[0]
        raise MatrixError(
            f"not published: {len(report.wrong)} verdicts are not as predicted, the first of them {cell.id}: "
            f"{record.issue} {record.subject} {record.strategy} is {record.verdict}; correct the catalogue or the code"
        )
    short = [cell.id for cell in report.unfinished if cell.sidecar.state != Verdict.UNTESTABLE.value]
    if short:
        raise MatrixError(f"not published: {', '.join(short)} was not finished; run it again first")
    date = max(last_day(layout.results), before.date if keep else "")
    if date < before.date:
        raise MatrixError(
            f"not published: what is published was measured until {before.date}, these cells until {date}; run them "
            f"again, or restore {layout.evidence} of an earlier day"
        )
    # First, so that a command that is cut short loses neither; pages leave it out while it is the published one.
    history_files = [history.keep(before, layout.history)] if before.date and before.date < date else []
    write_whole(layout.evidence, evidence_of(report, date).to_json())
    keep_seconds((cell.sidecar for cell in report.cells), layout)
    return [layout.evidence, *write_pages(layout), *history_files]


def _check_sources(report: Report) -> None:
    """Each cell must have been measured with one code and one set of packages.

    Raises:
        MatrixError: there is nothing to publish, or a cell was measured with several, or otherwise than its run says.
    """
    account = Account("cells", (cell.id for cell in report.cells if cell.sidecar.state != UNTESTABLE))
    for cell in report.cells:
        sources = sorted({record.provenance for record in cell.verdicts})
        expected = cell.sidecar.provenance
        if len(sources) > 1:
            account.refuse(cell.id, "has verdicts of different code or packages")
        elif sources and expected and (why := difference(sources[0], Provenance.parse(expected))):
            account.refuse(cell.id, f"has verdicts that were measured {why} than its run")
        elif cell.sidecar.state != UNTESTABLE:
            account.meet(cell.id)
    if not account.is_complete:
        raise MatrixError(f"not published: {account.shortfall()}; run it again first, with: -- --fresh")


def _check_kept(cell: CellReport, earlier_records: Sequence[Record]) -> None:
    """Verdicts of other code may stand beside new ones, each with its origin; those of other packages may not.

    Raises:
        MatrixError: they were measured with other packages, although the versions of the stack are the same.
    """
    current = {Provenance.parse(record.provenance).packages for record in cell.verdicts} - {""}
    earlier = {Provenance.parse(record.provenance).packages for record in earlier_records} - {""}
    if current and earlier - current:
        raise MatrixError(
            f"not published: of {cell.id} {len(earlier_records)} verdicts would be kept that were measured with other "
            "packages than those of now, though the stack's versions are the same; run the whole cell again, or "
            "publish without --keep"
        )


def _with_kept(report: Report, before: Report) -> Report:
    earlier_cells = {cell.id: cell for cell in before.cells}

    def completed(cell: CellReport) -> CellReport:
        earlier = earlier_cells.get(cell.id)
        if earlier is None or versions_of(earlier.versions) != versions_of(cell.versions):
            return cell
        anew = {record.key for record in cell.verdicts}
        missing = tuple(record for record in earlier.verdicts if record.key not in anew)
        _check_kept(cell, missing)
        return dataclasses.replace(cell, verdicts=(*cell.verdicts, *missing), measured_on=earlier.measured_on)

    return merge(dataclasses.replace(report, cells=tuple(map(completed, report.cells))), before.cells)


def write_pages(layout: Layout) -> list[Path]:
    """Write the pages from the evidence that stands there and the catalogue as it is now, and return their paths.

    The build of the site writes them as well, with others; git ignores them.

    Raises:
        MatrixError: nothing was published.
    """
    pages = pages_of_evidence(layout)
    for path, text in pages.items():
        write_whole(path, text)
    remove_old_issues(layout, pages)
    return list(pages)


def remove_old_issues(layout: Layout, pages: Container[Path]) -> None:
    """Remove the pages of issues that the catalogue no longer has."""
    for path in layout.issues.glob("*.md"):
        if path not in pages:
            path.unlink()


def pages_of_evidence(layout: Layout) -> Mapping[Path, str]:
    """The pages' paths and texts, from the evidence that stands there and the catalogue as it is now.

    Raises:
        MatrixError: nothing was published.
    """
    evidence = _load(layout)
    changes = compare(evidence, history.read(layout.history, before=evidence.date))
    return site.pages(report_of(evidence), evidence, layout, changes)


def _standing(layout: Layout) -> Evidence:
    """What is published; none where that cannot be read."""
    try:
        return load(layout.evidence)
    except EvidenceError:
        # To publish again is what helps then.
        return Evidence()


def _load(layout: Layout) -> Evidence:
    try:
        return load(layout.evidence)
    except EvidenceError as error:
        raise MatrixError(f"nothing was published yet: {error}") from error


def since_published(report: Report, layout: Layout, date: str) -> Changes:
    """What changed since the sweeps that were published in a checkout until ``date``; later ones are left out."""
    past = history.read(layout.history)
    sweeps, problems = {sweep.date: sweep for sweep in past.sweeps}, past.problems
    try:
        published = load(layout.evidence)
        sweeps[published.date] = published
    except EvidenceError as error:
        problems = (*problems, str(error)) if layout.evidence.exists() else problems
    earlier = tuple(sweeps[day] for day in sorted(sweeps) if day and day <= date)
    return compare(evidence_of(report, date), history.Past(earlier, problems))


def last_day(results: Path) -> str:
    """The day on which the newest cell ended; 1970-01-01 where none has left a sidecar."""
    newest = max((path.stat().st_mtime for path in results.glob("*.cell.json")), default=0.0)
    return datetime.datetime.fromtimestamp(newest, datetime.timezone.utc).date().isoformat()


def with_boundaries(report: Report) -> Report:
    """The report together with the boundaries, of the issues that it is about, that its cells leave unmeasured."""
    known = known_issues.load()
    reported = Catalog({name: known[name] for name in report.issues if name in known})
    unmeasured = boundaries.unmeasured(reported, evidence_of(report))
    return dataclasses.replace(report, unmeasured=tuple(boundary.describe() for boundary in unmeasured))
