"""The published pages: an overview, a page for each known issue, their index, and the page that one explores.

All follow from the evidence and the catalogue, so that they can be made anew without a sweep. Markdown that GitHub and
MyST read alike, without markup of its own from data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from pytest_trlcompat._escaping import in_block, in_row, printable
from pytest_trlcompat.catalog import known_issues, remedies
from pytest_trlcompat.catalog.evidence import Evidence
from pytest_trlcompat.catalog.issue import SUBJECTS, TRAINERS, KnownIssue
from pytest_trlcompat.catalog.summary_parts import PROBLEMS, CellSummary, corrected, least_to_most
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.report import explorer
from pytest_trlcompat.matrix.report.changes import Changes
from pytest_trlcompat.matrix.report.issue_page import issue_page, own_verdicts, version_span
from pytest_trlcompat.matrix.report.model import CellReport, Report
from pytest_trlcompat.matrix.report.rows import release
from pytest_trlcompat.matrix.report.texts import MEANINGS
from pytest_trlcompat.matrix.report.torch_comparison import TorchComparison, compare

__all__ = ["pages"]

_MADE = "<!-- Made by the build of the site, and by `nox -s report -- --pages`; do not edit. -->"
_MOST = 30
"""Changes that the overview names."""
_TITLE = "Compatibility, as measured"
_UPSTREAM = SUBJECTS[0]


def pages(report: Report, evidence: Evidence, layout: Layout, changes: Changes) -> Mapping[Path, str]:
    """Each page's path and text."""
    torch = compare(report.cells, report.columns)
    known = known_issues.load()
    lines_of = {
        layout.page: _overview(report, evidence, torch, changes),
        layout.issues / "index.md": _index(report, known),
        **{layout.issues / f"{name}.md": _issue(issue, report, evidence, torch) for name, issue in known.items()},
    }
    texts = {path: printable("\n".join(lines)) + "\n" for path, lines in lines_of.items()}
    return {**texts, layout.explorer: explorer.html(report, changes, evidence=False, title=_TITLE)}


# ---- the overview


def _overview(report: Report, evidence: Evidence, torch: TorchComparison, changes: Changes) -> Iterator[str]:
    verdicts = sum(len(cell.verdicts) for cell in report.cells)
    yield f"# {_TITLE}"
    yield ""
    yield _MADE
    yield ""
    yield (
        f"Measured until {in_row(evidence.date)}: {len(report.cells)} cells, {verdicts:,} verdicts, each from real "
        "launches of tiny models on the software accelerator. What is not listed was not measured. For your own stack, "
        "installed or only planned: `trlcompat doctor`."
    )
    yield ""
    yield "- [The known issues](issues/index.md), a page each: who is affected, how it shows, what cures it, numbers."
    yield "- All cells and verdicts as a page to explore, with filters: [Known issues](known-issues.md) leads to it."
    yield "- The same as data: `fixtures/evidence.json`. Every version of a cell stands in its lock, `fixtures/locks`."
    yield "- Run a cell again: `nox -s cell -- trl=0.15.2 transformers=4.48.3`. All of them: `nox -s matrix -- --full`,"
    yield "  whose report holds the numbers behind each verdict."
    if torch.summary:
        yield f"- {torch.summary.capitalize()}; the pages of the issues name each."
    yield ""
    yield "## Releases of TRL"
    yield ""
    yield "How many known issues affect TRL's own trainers in the cells of each release, and whether the corrected"
    yield "trainers are `ok`. `3-5` means: three in one cell, five in another."
    yield ""
    kinds = [verdict for verdict in PROBLEMS if any(_problems(cell, verdict) for cell in report.cells)]
    yield f"| trl | cells | transformers | torch |{''.join(f' {verdict} |' for verdict in kinds)} corrected |"
    yield f"| --- | --: | --- | --- |{' --: |' * len(kinds)} --- |"
    for trl, cells in reversed(report.releases):
        counted = [CellSummary(cell.id, trl, cell.verdicts) for cell in cells]
        spans = " | ".join(
            version_span(release(cell, package) for cell in cells) for package in ("transformers", "torch")
        )
        numbers = "".join(f" {least_to_most(counted, verdict)} |" for verdict in kinds)
        yield f"| {in_row(trl)} | {len(cells)} | {spans} |{numbers} {corrected(counted)[0] or '-'} |"
    yield ""
    if changes.last:
        yield from _changed(changes)
    yield "## Verdicts"
    yield ""
    yield from (f"- `{verdict}`: {meaning}" for verdict, meaning in MEANINGS.items())
    if report.unattributed:
        yield ""
        yield report.unattributed


def _changed(changes: Changes) -> Iterator[str]:
    yield "## What changed"
    yield ""
    yield f"{in_block(changes.summary.capitalize())}."
    yield "Earlier sweeps are kept in `evidence/`; the page to explore says since when each verdict stands."
    yield ""
    for change in changes.changed[:_MOST]:
        yield f"- {in_block(change.describe())}"
    if (more := len(changes.changed) - _MOST) > 0:
        yield f"- and {more} more, which the page to explore names"
    if changes.changed:
        yield ""


def _problems(cell: CellReport, verdict: Verdict) -> bool:
    return any(record.subject == _UPSTREAM and record.verdict is verdict for record in cell.verdicts)


# ---- the index


def _index(report: Report, known: Mapping[str, KnownIssue]) -> Iterator[str]:
    yield "# Known issues"
    yield ""
    yield _MADE
    yield ""
    yield "What was found wrong in TRL's own trainers, and with which releases of TRL it was measured."
    for trainer in (*TRAINERS, ""):
        yield ""
        yield f"## {trainer.upper() or 'Any trainer'}"
        yield ""
        yield "| issue | what | verdicts | with trl | needs no cure from |"
        yield "| --- | --- | --- | --- | --- |"
        for name, issue in sorted(known.items()):
            if issue.trainer == trainer:
                affected = [cell for cell in report.cells if own_verdicts(cell, name)]
                verdicts = {verdict for cell in affected for verdict in own_verdicts(cell, name)}
                named = ", ".join(str(verdict) for verdict in PROBLEMS if verdict in verdicts) or "-"
                span = version_span(release(cell, "trl") for cell in affected) or "-"
                yield (
                    f"| [{name}]({name}.md) | {in_row(issue.title)} | {named} | {span} "
                    f"| {in_row(remedies.cured_in(issue)) or 'no release yet'} |"
                )


# ---- a known issue


def _issue(issue: KnownIssue, report: Report, evidence: Evidence, torch: TorchComparison) -> Iterator[str]:
    title, *rest = issue_page(issue, report, evidence, torch)
    yield from (title, "", _MADE, *rest)
