"""The report's one model: all cells that left results, merged."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from pytest_trlcompat._secrets import Redactor
from pytest_trlcompat.catalog.attribution import attributed, expecting
from pytest_trlcompat.catalog.evidence import Evidence, MeasuredCell, Origin
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.verdict import Record, Scan, Verdict, is_wrong, scan_records
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.results import TESTED, UNTESTABLE, Sidecar, scan_sidecar
from pytest_trlcompat.stack import TELLING, versions_of
from pytest_trlcompat.strategies import NAMES, without_variant

__all__ = ["DAMAGED", "CellReport", "Column", "Report", "evidence_of", "gather", "merge"]

DAMAGED = "damaged"
"""The state of a cell whose files cannot be read, or not all of what stands in them."""

_NAMED = 5
"""How many problems of a cell's files its reason names."""

_SUBJECTS = ("upstream", "corrected")


@dataclass(frozen=True, order=True)
class Column:
    """What is measured in every cell."""

    issue: str
    subject: str
    strategy: str


@dataclass(frozen=True)
class CellReport:
    """A cell and its verdicts; none for a cell that is untestable.

    Attributes:
        versions_known: whether its versions could be read. If not, its verdicts are shown as they were judged when
            they were measured, and count for nothing else.
        measured_on: of verdicts that were published before, their provenance to the day of that sweep.
    """

    sidecar: Sidecar
    verdicts: tuple[Record, ...]
    versions_known: bool = True
    measured_on: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def versions(self) -> dict[str, str]:
        """What was pinned and resolved, package to version."""
        return {**self.sidecar.pins, **self.sidecar.lock}

    @property
    def id(self) -> str:
        return self.sidecar.id

    @property
    def torch(self) -> str:
        """Its version of torch, empty where that is not known."""
        return self.sidecar.lock.get("torch") or self.sidecar.pins.get("torch", "")

    @property
    def named(self) -> dict[str, str]:
        """The pins that its id names: without those that every cell has by default."""
        dashed = f"-{self.id}-"
        return {
            package: version
            for package, version in self.sidecar.pins.items()
            if package in ("trl", "transformers") or f"-{package}{version}-" in dashed
        }

    @property
    def wrong(self) -> list[Record]:
        return [record for record in self.verdicts if is_wrong(record)]

    def of_issue(self, issue: str) -> list[Record]:
        """The verdicts of one issue: a page of each asks for its own."""
        return self._by_issue.get(issue, [])

    @functools.cached_property
    def _by_issue(self) -> dict[str, list[Record]]:
        records: dict[str, list[Record]] = {}
        for record in self.verdicts:
            records.setdefault(record.issue, []).append(record)
        return records

    @functools.cached_property
    def _by_key(self) -> dict[tuple[str, str, str], Record]:
        return {record.key: record for record in self.verdicts}

    def at(self, column: Column) -> Record | None:
        return self._by_key.get((column.issue, column.subject, column.strategy))

    def anchor(self, record: Record) -> str:
        """Where the evidence of a verdict stands, in Markdown and HTML."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", "--".join((self.id, *record.key)))

    def to_dict(self) -> dict[str, Any]:
        sidecar = self.sidecar
        return {
            "id": sidecar.id,
            "pins": dict(sidecar.pins),
            "date": sidecar.date,
            "lock": dict(sidecar.lock),
            "state": sidecar.state,
            "reason": sidecar.reason,
            "seconds": sidecar.seconds,
            "verdicts": [json.loads(record.to_json()) for record in self.verdicts],
        }


@dataclass(frozen=True)
class Report:
    """All cells, oldest TRL first.

    Attributes:
        unmeasured: boundaries of the catalogue, a line each, of which no cell has measured both sides.
    """

    cells: tuple[CellReport, ...]
    unmeasured: tuple[str, ...] = ()

    @functools.cached_property
    def columns(self) -> list[Column]:
        """What was measured in some cell; issues by name, the upstream subject first."""
        measured = {Column(*record.key) for cell in self.cells for record in cell.verdicts}
        return sorted(measured, key=lambda c: (c.issue, _position(c.subject, _SUBJECTS), _position(c.strategy, NAMES)))

    @property
    def issues(self) -> list[str]:
        return list(dict.fromkeys(column.issue for column in self.columns))

    def groups(self, issue: str) -> list[tuple[str, list[Column]]]:
        """The columns of one issue, by subject."""
        columns = (column for column in self.columns if column.issue == issue)
        return [(subject, list(group)) for subject, group in itertools.groupby(columns, lambda c: c.subject)]

    @functools.cached_property
    def torches(self) -> list[str]:
        """The releases of torch that its cells have, oldest first."""
        return sorted({cell.torch for cell in self.cells if cell.torch}, key=Version)

    def name(self, cell: CellReport) -> str:
        """A cell's id, and its torch where cells differ in that and the id does not name it."""
        clear = len(self.torches) < 2 or "torch" in cell.named or not cell.torch
        return cell.id if clear else f"{cell.id} (torch {cell.torch})"

    def short(self, cell: CellReport) -> str:
        """The name without the release of TRL: ``4.48.3``, ``4.48.3 accelerate 1.3.0``."""
        pins = {**cell.named, **({"torch": cell.torch} if len(self.torches) > 1 and cell.torch else {})}
        others = (f"{package} {version}" for package, version in pins.items() if package not in ("trl", "transformers"))
        return " ".join([*([pins["transformers"]] if "transformers" in pins else []), *others]) or cell.id

    @property
    def releases(self) -> list[tuple[str, list[CellReport]]]:
        """The cells by their release of TRL."""
        grouped = itertools.groupby(self.cells, lambda cell: cell.sidecar.pins.get("trl", ""))
        return [(trl, list(cells)) for trl, cells in grouped]

    @property
    def wrong(self) -> list[tuple[CellReport, Record]]:
        """What is not as predicted, and failures that nothing predicted."""
        return [(cell, record) for cell in self.cells for record in cell.wrong]

    @property
    def untested(self) -> list[tuple[str, list[tuple[CellReport, Record]]]]:
        """The verdicts that the software accelerator could not give, by their reason, the most frequent first."""
        verdicts_of: dict[str, list[tuple[CellReport, Record]]] = {}
        for cell in self.cells:
            for record in cell.verdicts:
                if record.untested:
                    verdicts_of.setdefault(record.reason, []).append((cell, record))
        return sorted(verdicts_of.items(), key=lambda entry: -len(entry[1]))

    @property
    def has_measured(self) -> bool:
        """Whether some verdict speaks for or against a library."""
        return any(not record.untested for cell in self.cells for record in cell.verdicts)

    @property
    def unfinished(self) -> list[CellReport]:
        """Cells that are untestable, were cut short, or left files that cannot be read."""
        return [cell for cell in self.cells if cell.sidecar.state != "tested"]

    @property
    def unattributed(self) -> str:
        """What is to be said of failures measured before they were attributed to known issues; empty if of none."""
        number = sum(
            record.unattributed and record.expected is Verdict.BLOCKED for c in self.cells for record in c.verdicts
        )
        if not number:
            return ""
        return (
            f"{number} of the verdicts error were measured before failures were attributed to known issues. The "
            "catalogue predicts blocked for each of them; which issue stopped the suite was not measured."
        )

    @property
    def counts(self) -> Mapping[Verdict, int]:
        counter = Counter(record.verdict for cell in self.cells for record in cell.verdicts)
        counter[Verdict.UNTESTABLE] += sum(cell.sidecar.state == UNTESTABLE for cell in self.cells)
        return {verdict: counter[verdict] for verdict in Verdict if counter[verdict]}

    @property
    def summary(self) -> str:
        """One line for people."""
        verdicts = sum(len(cell.verdicts) for cell in self.cells)
        torch = " to ".join(dict.fromkeys([*self.torches[:1], *self.torches[-1:]]))
        parts = [f"{_many(len(self.cells), 'cell')}, {_many(verdicts, 'verdict')}" + (torch and f", torch {torch}")]
        untested = [record for _, alike in self.untested for _, record in alike]
        if self.wrong:
            parts.append(f"{len(self.wrong)} not as predicted")
        elif self.has_measured:
            parts.append("all as predicted")
        elif verdicts or not self.unfinished:
            parts.append("nothing was measured")
        if untested:
            ours = sum(record.subject == "corrected" for record in untested)
            of_ours = f" ({ours} of corrected trainers)" if ours else ""
            parts.append(f"{len(untested)} could not be tested, by the software accelerator{of_ours}")
        if self.unfinished:
            parts.append(f"{_many(len(self.unfinished), 'cell')} not finished")
        return "; ".join(parts)

    def of_sweep(self, name: str) -> Report:
        """The cells that one command ran."""
        return Report(tuple(cell for cell in self.cells if cell.sidecar.sweep == name))

    def judged_by(self, known: Catalog) -> Report:
        """The same verdicts, held against the predictions of a catalogue, as far as it knows their issues.

        A prediction that was corrected after a sweep is judged by what the sweep measured; no cell needs to run again.
        Which failures other known issues explain (``blocked``, or ``error``) follows from the catalogue as well, where
        the evidence has them; published evidence has verdicts alone, which stay as they are.
        """
        return dataclasses.replace(self, cells=tuple(_judged(cell, known) for cell in self.cells))

    def to_dict(self) -> dict[str, Any]:
        cells = [cell.to_dict() for cell in self.cells]
        return {"schema": 1, "cells": cells, **({"unmeasured": list(self.unmeasured)} if self.unmeasured else {})}


def gather(results: Path) -> Report:
    """Merge the sidecars and verdicts of a results folder.

    A cell whose files are damaged is :data:`DAMAGED`, with a reason that names file, line and what is wrong, and has
    the verdicts that could be read; it does not keep the others from being shown.

    Raises:
        MatrixError: when there are none.
    """
    names = {path.name.removesuffix(_SIDECAR) for path in results.glob(f"*{_SIDECAR}")}
    names |= {path.name.removesuffix(_RECORDS) for path in results.glob(f"*{_RECORDS}")}
    if not names:
        raise MatrixError(f"{results}: no cell has left results there; run one with: nox -s matrix")
    # One for all cells: it reads the environment when it is made.
    redactor = Redactor()
    return Report(tuple(sorted((_gathered(results, name, redactor) for name in names), key=_age)))


_SIDECAR, _RECORDS = ".cell.json", ".jsonl"


def _gathered(results: Path, name: str, redactor: Redactor) -> CellReport:
    path, records = results / f"{name}{_SIDECAR}", results / f"{name}{_RECORDS}"
    try:
        sidecar, problems = scan_sidecar(path)
    except MatrixError as error:
        return CellReport(Sidecar(name, {}, DAMAGED, "", reason=f"{path.name} cannot be read: {error}"), (), False)
    # scan_sidecar begins a problem with the name of its field.
    versions_known = not any(problem.startswith("'lock'") for problem in problems)
    problems = [f"{path}: {problem}" for problem in problems]
    scan = scan_records(records)
    problems += [f"{records}{problem}" for problem in _problems(scan, sidecar, records)]
    if problems:
        more = [f"and {len(problems) - _NAMED} more"] if len(problems) > _NAMED else []
        reason = f"{'; '.join([*problems[:_NAMED], *more])}; remove the file and run the cell again"
        sidecar = dataclasses.replace(sidecar, state=DAMAGED, reason=reason)
    verdicts = (
        # Nothing was measured there: verdicts beside it are of an earlier run.
        () if sidecar.state == UNTESTABLE else tuple(record.without_secrets(redactor) for record in scan.records)
    )
    return CellReport(sidecar, verdicts, versions_known)


def _problems(scan: Scan, sidecar: Sidecar, records: Path) -> list[str]:
    """What is wrong with the verdicts of a cell that has ended; a run that was cut short may leave half a line."""
    if sidecar.state != TESTED:
        return list(scan.problems)
    if not scan.records and not scan.problems and not scan.torn and not os.path.lexists(records):
        return [f": there is no such file, but the cell is {TESTED}"]
    return [*scan.problems, *([scan.torn] if scan.torn else [])]


def merge(report: Report, others: Iterable[CellReport]) -> Report:
    """The report with those of ``others`` that it has not itself."""
    known = {cell.id for cell in report.cells}
    cells = [*report.cells, *(cell for cell in others if cell.id not in known)]
    return dataclasses.replace(report, cells=tuple(sorted(cells, key=_age)))


def _judged(cell: CellReport, known: Catalog) -> CellReport:
    if not cell.versions_known:
        return cell
    versions = versions_of(cell.versions)

    def judged(record: Record) -> Record:
        if record.issue not in known:
            return record
        issue = known[record.issue]
        prediction = issue.predict(record.subject, record.strategy, versions)
        return expecting(attributed(record, issue, versions, known, prediction), prediction)

    return dataclasses.replace(cell, verdicts=tuple(map(judged, cell.verdicts)))


def _age(cell: CellReport) -> tuple[Any, ...]:
    return (*(Version(cell.sidecar.pins.get(package, "0")) for package in TELLING), cell.id)


def _position(name: str, order: Sequence[str]) -> tuple[int, str]:
    """In this order, variants (``fsdp1-no_shard``) after their kind, others by name at the end."""
    kind = without_variant(name)
    return (order.index(kind) if kind in order else len(order), name)


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def evidence_of(report: Report, date: str = "") -> Evidence:
    """A sweep's cells as evidence; those without a verdict, or of unknown versions, are left out."""
    cells = (_measured(cell, date) for cell in report.cells if cell.verdicts and cell.versions_known)
    return Evidence(date, tuple(cells))


def _measured(cell: CellReport, date: str) -> MeasuredCell:
    versions = versions_of(cell.versions)
    verdicts = {record.key: record.verdict for record in cell.verdicts}
    attributed = not any(record.unattributed for record in cell.verdicts)
    blocked_by = {record.key: record.blocked_by for record in cell.verdicts if record.blocked_by}
    fitting = frozenset(record.key for record in cell.verdicts if record.fitting)
    origins = {
        record.key: Origin(record.provenance, cell.measured_on.get(record.provenance, date)) for record in cell.verdicts
    }
    # Of verdicts of this day's sweep, in which nobody wrote it down, there is nothing to say.
    known = any(origin != ("", date) for origin in origins.values())
    most = Counter(origins.values()).most_common(1)[0][0] if known else None
    others = {key: origin for key, origin in origins.items() if most is not None and origin != most}
    date_of_lock = cell.sidecar.date
    return MeasuredCell(cell.id, versions, verdicts, date_of_lock, attributed, blocked_by, fitting, most, others)
