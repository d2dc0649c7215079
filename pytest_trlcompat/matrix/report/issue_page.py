"""The page of a known issue, from the evidence and the catalogue: for the site, and for ``trlcompat issue``.

Markdown that GitHub and MyST read alike, without markup of its own from data. Needs no ``jinja2`` and no ``rich``,
which a plain installation lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from packaging.version import Version

from pytest_trlcompat._escaping import code, in_block, in_row
from pytest_trlcompat.catalog import boundaries, remedies
from pytest_trlcompat.catalog.evidence import Evidence
from pytest_trlcompat.catalog.issue import SEVERITY_TEXTS, STRATEGIES, SUBJECTS, KnownIssue
from pytest_trlcompat.catalog.regions import regions
from pytest_trlcompat.catalog.summary_parts import PROBLEMS, CellSummary, corrected
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.matrix.report.model import CellReport, Column, Report
from pytest_trlcompat.matrix.report.rows import axes, has_other_pins, rows
from pytest_trlcompat.matrix.report.torch_comparison import TorchComparison

__all__ = ["issue_page", "own_verdicts", "version_span"]

_UPSTREAM, _CORRECTED = SUBJECTS


def own_verdicts(cell: CellReport, issue: str) -> set[Verdict]:
    """What the issue itself does in a cell to TRL's own trainers, not what keeps it from being seen."""
    verdicts = {record.verdict for record in cell.of_issue(issue) if record.subject == _UPSTREAM}
    return {verdict for verdict in verdicts if verdict.is_own_problem}


def version_span(versions: Iterable[str]) -> str:
    known: Sequence[str] = sorted({version for version in versions if version}, key=Version)
    return " to ".join(dict.fromkeys([*known[:1], *known[-1:]]))


def issue_page(issue: KnownIssue, report: Report, evidence: Evidence, torch: TorchComparison) -> Iterator[str]:
    """The lines of the page."""
    yield f"# {issue.id}"
    yield ""
    yield f"{in_block(issue.title)}."
    yield ""
    yield f"- **Severity:** {issue.severity}: {SEVERITY_TEXTS[issue.severity]}"
    yield f"- **What is wrong:** {in_row(issue.wrong)}"
    yield f"- **What to do:** {in_row(remedies.remedy(issue, ways=remedies.ways_of(issue, evidence.cells)))}"
    yield f"- **Upstream:** {', '.join(f'<{link}>' for link in issue.upstream) or 'not reported'}"
    yield ""
    yield "## Who is affected"
    yield ""
    yield from _affected(issue, _UPSTREAM) or ["The catalogue predicts no problem for any version."]
    yield ""
    yield "## How it shows"
    yield ""
    yield from _shows(issue, report)
    yield ""
    yield "## What cures it"
    yield ""
    yield from _cures(issue, report)
    yield ""
    yield "## What was measured"
    yield ""
    yield from _measured(issue, report)
    for change in torch.of(issue.id):
        yield f"- With another torch alone: {in_row(change.describe())}"
    if torch.of(issue.id):
        yield ""
    yield from _boundaries(issue, evidence)


def _affected(issue: KnownIssue, subject: str) -> list[str]:
    """A table of the predictions that are a problem, those of all strategies that agree in one row."""
    strategies_of: dict[tuple[Verdict, str, str], list[str]] = {}
    for strategy in issue.labels():
        for prediction, region in regions(issue, subject, strategy, {}).by_prediction():
            if prediction is not None and prediction.verdict.is_problem:
                by = f"blocked by [{prediction.by}]({prediction.by}.md): " if prediction.by else ""
                key = (prediction.verdict, region.describe() or "every version", f"{by}{in_row(prediction.why)}")
                strategies_of.setdefault(key, []).append(strategy)
    if not strategies_of:
        return []
    ordered = sorted(strategies_of.items(), key=lambda row: PROBLEMS.index(row[0][0]))
    return [
        "| verdict | strategies | versions | why |",
        "| --- | --- | --- | --- |",
        *(
            f"| **{verdict}** | {in_row(_strategies(issue, strategies))} | {in_row(versions)} | {why} |"
            for (verdict, versions, why), strategies in ordered
        ),
    ]


def _shows(issue: KnownIssue, report: Report) -> Iterator[str]:
    for symptom in issue.symptoms:
        yield f"- A {code(symptom.type_name)} whose text matches {code(symptom.pattern.pattern)}"
    yield f"- The suite `suites/{issue.suite}` shows it. In your own environment, with the plugin installed:"
    yield f"  `pytest -p trlcompat --pyargs pytest_trlcompat.suites --trlcompat-issue {issue.id}`"
    affected = [cell for cell in report.cells if own_verdicts(cell, issue.id)]
    affected = [cell for cell in affected if len(cell.named) == 2] or affected  # with the torch of all other cells
    if affected:
        pins = " ".join(f"{package}={version}" for package, version in affected[-1].named.items())
        command = f"nox -s cell -- {pins} --issue {issue.id}"
        yield f"- In the newest cell where it was measured: {code(command)}"


def _cures(issue: KnownIssue, report: Report) -> Iterator[str]:
    yield f"- In this package: {code(issue.cure)}" if issue.cure else "- Nothing in this package cures it."
    cured_in = remedies.cured_in(issue)
    yield f"- Not needed from: {in_row(cured_in)}" if cured_in else "- No release has cured it yet."
    mine = [CellSummary("", "", cell.of_issue(issue.id)) for cell in report.cells]
    if counted := corrected(mine)[0]:
        yield f"- Measured with the corrected trainers: {counted}"
    if rest := _affected(issue, _CORRECTED):
        yield ""
        yield "The corrected trainers are not right everywhere:"
        yield ""
        yield from rest


def _measured(issue: KnownIssue, report: Report) -> Iterator[str]:
    columns = [column for column in report.columns if column.issue == issue.id]
    measured = [cell for cell in report.cells if any(cell.at(column) for column in columns)]
    if not measured:
        yield "Nothing has been published."
        yield ""
        return
    # Those that differ in other pins have rows of their own, and would part their neighbours.
    part = Report(tuple(sorted(measured, key=has_other_pins)))
    yield "Neighbouring cells that agree share a row; problems are bold."
    yield ""
    heads = (f" {in_row(column.subject)} {in_row(column.strategy)} |" for column in columns)
    yield f"| {' | '.join(axes(part))} | cells |{''.join(heads)}"
    yield f"|{' --- |' * len(axes(part))} --: |{' --- |' * len(columns)}"
    for row in rows(part, columns):
        shown = "".join(f" {_shown(row.first, column)} |" for column in columns)
        yield f"| {' | '.join(map(in_row, row.labels))} |{shown}"
    yield ""


def _shown(cell: CellReport, column: Column) -> str:
    record = cell.at(column)
    return "-" if record is None else f"**{record.verdict}**" if record.verdict.is_problem else str(record.verdict)


def _strategies(issue: KnownIssue, strategies: Sequence[str]) -> str:
    if len(strategies) > 1 and set(strategies) >= set(issue.labels()):
        return "all"
    # All but some variants, which have a row of their own.
    if set(strategies) >= set(STRATEGIES):
        return ", ".join(["every strategy", *(strategy for strategy in strategies if strategy not in STRATEGIES)])
    return ", ".join(strategies)


def _boundaries(issue: KnownIssue, evidence: Evidence) -> Iterator[str]:
    every = [boundaries.measure(boundary, evidence) for boundary in boundaries.boundaries(issue)]
    yield "## Boundaries"
    yield ""
    yield f"Versions at which the catalogue says that a verdict changes: {_counted(every)}."
    for title, both in (("Measured on both sides", True), ("Not measured on both sides", False)):
        in_section = [measured for measured in every if measured.both is both]
        if in_section:
            yield ""
            yield f"### {title}"
            yield ""
            yield "| trainers | strategies | change | below | above |"
            yield "| --- | --- | --- | --- | --- |"
            for measured in in_section:
                boundary = measured.boundary
                change = in_row(boundary.describe().partition(": ")[2])
                strategies = in_row(_strategies(issue, boundary.strategies))
                below, above = _side(measured.below), _side(measured.above)
                yield f"| {boundary.subject} | {strategies} | {change} | {below} | {above} |"


def _counted(every: Sequence[boundaries.Measured]) -> str:
    both = sum(boundary.both for boundary in every)
    return f"{both} of {len(every)} measured on both sides" if every else "none"


def _side(side: boundaries.Side | None) -> str:
    return f"{in_row(side.version)} ({len(side.cells)} cell{'s' * (len(side.cells) != 1)})" if side else "not measured"
