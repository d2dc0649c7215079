"""Publishing a sweep: the evidence that ships with the package, and the page that people read.

``fixtures/evidence.json`` holds the versions and verdicts of each cell, ``docs/compatibility.md`` the tables. Imports
no package of the stack.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pytest_trlcompat import __version__
from pytest_trlcompat.catalog import boundaries, known_issues, remedies
from pytest_trlcompat.catalog.evidence import Evidence, EvidenceError, MeasuredCell, load
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.verdict import Record, Verdict
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.files import write_whole
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.report.model import CellReport, Column, Report, merge
from pytest_trlcompat.matrix.report.torch_comparison import compare
from pytest_trlcompat.matrix.results import TESTED, Sidecar
from pytest_trlcompat.stack import PACKAGES

__all__ = ["evidence_of", "last_day", "page", "publish", "with_boundaries"]

_SHOWN = ("torch", "accelerate", "deepspeed", "peft", "datasets")


def publish(report: Report, layout: Layout, *, keep: bool = False) -> list[Path]:
    """Write the evidence and the page, and return their paths.

    Args:
        keep: publish the cells of the evidence that stands there as well, as far as ``report`` has not run them anew.
            All are held against the catalogue as it is now.

    Raises:
        MatrixError: a verdict is not as predicted, or a cell was cut short: such a sweep is not fit to be relied upon.
    """
    if keep:
        report = merge(report, _published_before(layout)).judged_by(known_issues.load())
    if report.wrong:
        cell, record = report.wrong[0]
        raise MatrixError(
            f"not published: {len(report.wrong)} verdicts are not as predicted, the first of them {cell.id}: "
            f"{record.issue} {record.subject} {record.strategy} is {record.verdict}; mend the catalogue or the code"
        )
    short = [cell.id for cell in report.unfinished if cell.sidecar.state != Verdict.UNTESTABLE.value]
    if short:
        raise MatrixError(f"not published: {', '.join(short)} was not finished; run it again first")
    evidence = evidence_of(report, last_day(layout.results))
    write_whole(layout.evidence, evidence.to_json())
    write_whole(layout.page, page(report, evidence, layout))
    return [layout.evidence, layout.page]


def evidence_of(report: Report, date: str = "") -> Evidence:
    """A sweep's cells as evidence; those without a verdict are left out."""
    return Evidence(date, tuple(_measured(cell) for cell in report.cells if cell.verdicts))


def _measured(cell: CellReport) -> MeasuredCell:
    installed = cell.versions
    versions = {package: installed[package] for package in PACKAGES if package in installed}
    verdicts = {record.key: record.verdict for record in cell.verdicts}
    attributed = not any(record.unattributed for record in cell.verdicts)
    return MeasuredCell(cell.id, versions, verdicts, cell.sidecar.date, attributed)


def _published_before(layout: Layout) -> Iterator[CellReport]:
    """The cells of the evidence that stands there: versions of the stack and verdicts, no more is kept of them."""
    try:
        before = load(layout.evidence)
    except EvidenceError as error:
        raise MatrixError(f"nothing was published that could be kept: {error}") from error
    for cell in before.cells:
        sidecar = Sidecar(cell.id, dict(cell.versions), TESTED, "", lock=dict(cell.versions), date=cell.date)
        known = {} if cell.attributed else {"attributed": False}
        yield CellReport(sidecar, tuple(Record(*key, verdict, None, known) for key, verdict in cell.verdicts.items()))


def last_day(results: Path) -> str:
    """The day on which the newest cell ended."""
    newest = max(path.stat().st_mtime for path in results.glob("*.cell.json"))
    return datetime.datetime.fromtimestamp(newest, datetime.timezone.utc).date().isoformat()


def with_boundaries(report: Report) -> Report:
    """The report together with the boundaries, of the issues that it is about, that its cells leave unmeasured."""
    known = known_issues.load()
    asked = Catalog({name: known[name] for name in report.issues if name in known})
    found = boundaries.unmeasured(asked, evidence_of(report))
    return dataclasses.replace(report, unmeasured=tuple(each.describe() for each in found))


def page(report: Report, evidence: Evidence, layout: Layout) -> str:
    """The page for people, Markdown."""
    lines = [
        *_head(report, evidence),
        *_overview(report, layout),
        *_issues(report),
        *_boundaries(report, evidence),
    ]
    return "\n".join(lines) + "\n"


def _head(report: Report, evidence: Evidence) -> Iterator[str]:
    verdicts = sum(len(cell.verdicts) for cell in report.cells)
    yield "# Compatibility, as measured"
    yield ""
    yield (
        f"Measured on {evidence.date} with pytest-trlcompat {__version__}: {len(report.cells)} cells, {verdicts} "
        "verdicts, each from real launches of tiny models on a software accelerator. Written by "
        "`nox -s report -- --publish`; do not edit."
    )
    yield ""
    if summary := compare(report.cells, report.columns).summary:
        yield f"{summary[0].upper()}{summary[1:]}; each is named below with its issue."
        yield ""
    yield "What is not listed here was not measured. For your own stack, installed or only planned: `trlcompat doctor`."
    yield ""
    yield "- Run one cell again: `nox -s cell -- trl=0.15.2 transformers=4.48.3`. All of them:"
    yield "  `nox -s matrix -- --full`, then `nox -s report`, whose pages hold the numbers behind each verdict."
    yield "- Every version of a cell stands in its lock, linked below; cells are resolved as of their date."
    yield "- The same as data: [evidence.json](../fixtures/evidence.json). What each issue is:"
    yield "  [catalog.toml](../pytest_trlcompat/catalog/catalog.toml)."
    yield ""


def _overview(report: Report, layout: Layout) -> Iterator[str]:
    yield "## What bites where"
    yield ""
    yield "TRL's own trainers, and whether the corrected ones are `ok`."
    yield ""
    yield f"| cell | as of | {' | '.join(_SHOWN)} | what bites | corrected |"
    yield f"|{' --- |' * (len(_SHOWN) + 4)}"
    for cell in report.cells:
        versions = _measured(cell).versions
        stack = " | ".join(versions.get(package, "-") for package in _SHOWN)
        nothing = "nothing known" if cell.verdicts else cell.sidecar.state
        bites = "<br>".join([*(list(_bites(cell, "upstream")) or [nothing]), *_untested(cell, "upstream")])
        helps = list(_bites(cell, "corrected")) or [_counted(cell)]
        corrected = "<br>".join([*helps, *_untested(cell, "corrected")])
        yield f"| {_linked(cell, layout)} | {cell.sidecar.date or '-'} | {stack} | {bites} | {corrected} |"
    yield ""


def _linked(cell: CellReport, layout: Layout) -> str:
    lock = layout.locks / f"{cell.id}.txt"
    return f"[{cell.id}](../fixtures/locks/{lock.name})" if lock.is_file() else cell.id


def _bites(cell: CellReport, subject: str) -> Iterator[str]:
    """``grpo-fsdp-ref-model: broken under fsdp1, fsdp2`` for each issue that does."""
    found: dict[tuple[str, Verdict], list[str]] = {}
    for record in cell.verdicts:
        if record.subject == subject and record.verdict.is_problem:
            found.setdefault((record.issue, record.verdict), []).append(record.strategy)
    for (issue, verdict), strategies in sorted(found.items()):
        yield f"[{issue}](#{issue}): {verdict} ({', '.join(strategies)})"


def _counted(cell: CellReport) -> str:
    fine = sum(record.subject == "corrected" and record.verdict is Verdict.OK for record in cell.verdicts)
    return f"ok ({fine})" if fine else "-"


def _untested(cell: CellReport, subject: str) -> list[str]:
    """``untestable (3)``, of which nothing is known, for want of the software accelerator."""
    number = sum(record.subject == subject and record.untested for record in cell.verdicts)
    return [f"untestable ({number})"] if number else []


def _issues(report: Report) -> Iterator[str]:
    known = known_issues.load()
    torch = compare(report.cells, report.columns)
    for name in report.issues:
        columns = [column for column in report.columns if column.issue == name]
        yield f"## {name}"
        yield ""
        if name in known:
            issue = known[name]
            yield f"{issue.title}: {issue.wrong}."
            yield ""
            yield f"What to do: {remedies.remedy(issue)}. Upstream: {', '.join(issue.upstream) or 'not reported'}."
            yield ""
        for change in torch.of(name):
            yield f"- With another torch alone: {change.describe()}"
        if torch.of(name):
            yield ""
        yield from _table(report, columns)
        yield ""


def _table(report: Report, columns: Sequence[Column]) -> Iterator[str]:
    yield f"| cell | {' | '.join(f'{column.subject} {column.strategy}' for column in columns)} |"
    yield f"|{' --- |' * (len(columns) + 1)}"
    asked = (cell for cell in report.cells if any(cell.at(column) for column in columns))
    for row, alike in itertools.groupby(asked, lambda cell: " | ".join(_row(cell, columns))):
        yield f"| {_named(list(alike))} | {row} |"


def _named(cells: Sequence[CellReport]) -> str:
    """Cells that follow each other and agree; each has a row of its own in the overview."""
    return cells[0].id if len(cells) == 1 else f"{cells[0].id} to {cells[-1].id}, {len(cells)} cells"


def _row(cell: CellReport, columns: Sequence[Column]) -> Iterator[str]:
    records: Iterable[Record | None] = (cell.at(column) for column in columns)
    for record in records:
        yield "-" if record is None else f"**{record.verdict}**" if record.verdict.is_problem else record.verdict.value


def _boundaries(report: Report, evidence: Evidence) -> Iterator[str]:
    known = known_issues.load()
    every = [
        boundaries.measure(boundary, evidence)
        for name in report.issues
        if name in known
        for boundary in boundaries.boundaries(known[name])
    ]
    yield "## Boundaries"
    yield ""
    yield "Where the catalogue says that a verdict changes, and the nearest cells on either side."
    yield ""
    yield from (f"- {each.describe()}" for each in every if each.both)
    yield ""
    yield "### Boundaries not measured"
    yield ""
    yield from (f"- {each.describe()}" for each in every if not each.both)
    if all(each.both for each in every):
        yield "None."
