"""What new releases changed: verdicts that the catalogue does not predict, by the release that brings them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from packaging.version import Version

from pytest_trlcompat.catalog.attribution import failures_in
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.catalog.verdict import Record, Verdict, is_wrong
from pytest_trlcompat.matrix.report.model import CellReport, Report
from pytest_trlcompat.watch.plan import WatchedCell

__all__ = ["Change", "Kind", "Verdicts", "changes_in", "judged", "known_wrong", "verdicts_of"]

Verdicts = Mapping[tuple[str, str, str], tuple[Verdict, str]]
"""What a stack gave: issue, subject and strategy to a verdict, and of ``blocked`` by which other issue."""

_FIRST_WORDS = 80
"""Characters of an error's message by which equal failures are known."""


class Kind(str, Enum):
    """What a verdict that nothing predicts says."""

    BROKE = "broke"
    """A problem where none was predicted."""
    CURED = "cured"
    """No problem where one was predicted."""
    CHANGED = "changed"
    """Another problem than the predicted one."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Change:
    """Verdicts of one known issue's suite that changed alike.

    Attributes:
        cell: in which they were measured: that of the first release that has them.
        records: one for each strategy.
        before: what the newest known stack gave, if it was measured: ``blocked by lora-zero3-checkpointing``.
        cause: equal for failures that have the same words at the same place, whatever suite met them.
        elsewhere: other cells of the same day that show it too.
    """

    cell: WatchedCell
    kind: Kind
    records: tuple[Record, ...]
    cause: str
    before: str = ""
    elsewhere: tuple[str, ...] = ()

    @property
    def record(self) -> Record:
        """The first, which stands for all."""
        return self.records[0]

    @property
    def issue(self) -> str:
        return self.record.issue

    @property
    def subject(self) -> str:
        return self.record.subject

    @property
    def strategies(self) -> tuple[str, ...]:
        return tuple(record.strategy for record in self.records)

    @property
    def key(self) -> str:
        """A name for files and anchors."""
        return "--".join((self.cell.cell.id, self.issue, self.subject, self.record.strategy))

    @property
    def is_ours(self) -> bool:
        """Whether it is the corrected trainer that fails: a matter of this project, not of the release."""
        return self.subject == "corrected" and self.kind is not Kind.CURED

    @property
    def sentence(self) -> str:
        """One line for people."""
        record = self.record
        named = f" by {record.blocked_by}" if record.blocked_by else ""
        predicted = f"predicted {record.expected}" if record.expected else "nothing was predicted"
        if expected := record.evidence.get("blocked_by_expected"):
            predicted += f" by {expected}"
        whose = "the corrected trainer" if self.subject == "corrected" else "TRL's own trainer"
        before = f"; before it was {self.before}" if self.before else ""
        return f"{self.issue}, {whose} under {', '.join(self.strategies)}: {record.verdict}{named}, {predicted}{before}"


def judged(report: Report, watched: Sequence[WatchedCell], catalog: Catalog) -> dict[str, CellReport]:
    """The cells of a plan that left verdicts, held against a catalogue, by id."""
    planned = {watched_cell.cell.id for watched_cell in watched}
    return {cell.id: cell for cell in report.judged_by(catalog).cells if cell.id in planned}


def verdicts_of(cell: CellReport | None) -> Verdicts:
    """What a cell gave."""
    return {record.key: (record.verdict, record.blocked_by) for record in cell.verdicts} if cell is not None else {}


def known_wrong(base: CellReport | None) -> list[Record]:
    """What nothing predicts of the newest known stack: there the catalogue is wrong, whatever is new."""
    return list(_noteworthy(base, {}))


def changes_in(watched: Sequence[WatchedCell], cells: Mapping[str, CellReport], base: Verdicts) -> list[Change]:
    """What nothing predicts, each once: with the first release that shows it alone, else with the newest of all.

    What the newest known stack shows as well is no change.

    Args:
        base: what that gave.
    """
    order = sorted(watched, key=_oldest_release_first)
    first: dict[tuple[object, ...], WatchedCell] = {}
    shown: dict[tuple[object, ...], list[str]] = {}
    for watched_cell in order:
        for record in _noteworthy(cells.get(watched_cell.cell.id), base):
            key = _answer(record)
            alone = first.setdefault(key, watched_cell)
            if alone is not watched_cell:
                shown.setdefault(key, []).append(watched_cell.cell.id)
    changes = []
    for watched_cell in order:
        records = [
            record
            for record in _noteworthy(cells.get(watched_cell.cell.id), base)
            if first[_answer(record)] is watched_cell
        ]
        changes += [_change(watched_cell, alike, shown, base) for alike in _alike(records, base)]
    return changes


def _oldest_release_first(watched: WatchedCell) -> tuple[object, ...]:
    release = watched.release
    return (1,) if release is None else (0, release.day, release.package, Version(release.version))


def _answer(record: Record) -> tuple[object, ...]:
    """Equal where two cells say the same."""
    return (*record.key, record.verdict, record.expected)


def _change(
    cell: WatchedCell, records: Sequence[Record], shown: Mapping[tuple[object, ...], Sequence[str]], base: Verdicts
) -> Change:
    first = records[0]
    elsewhere = {other for record in records for other in shown.get(_answer(record), ())}
    return Change(
        cell,
        _kind(first, base),
        tuple(records),
        _cause(first),
        _before(first, base),
        tuple(sorted(elsewhere)),
    )


def _noteworthy(cell: CellReport | None, base: Verdicts) -> Iterator[Record]:
    """Verdicts that are not as predicted, and problems of which nothing was predicted."""
    for record in cell.verdicts if cell is not None else ():
        nobody_knew = record.expected is None and record.verdict.is_own_problem
        # What the newest known stack shows too does not come from the release.
        same = base.get(record.key) == (record.verdict, record.blocked_by)
        if not record.untested and not same and (is_wrong(record) or nobody_knew):
            yield record


def _kind(record: Record, base: Verdicts) -> Kind:
    """By what the newest known stack gave, else by what was predicted of it."""
    before = base[record.key][0] if record.key in base else record.expected
    was = before is not None and before.is_problem
    if record.verdict.is_problem:
        return Kind.CHANGED if was else Kind.BROKE
    return Kind.CURED if was else Kind.CHANGED


def _before(record: Record, base: Verdicts) -> str:
    """What the newest known stack gave; empty where it was not measured."""
    if record.key not in base:
        return ""
    verdict, by = base[record.key]
    return f"{verdict} by {by}" if by else str(verdict)


def _alike(records: Iterable[Record], base: Verdicts) -> Iterator[list[Record]]:
    """Those of one issue and subject with the same verdict, prediction, cause, and verdict before."""

    def key(record: Record) -> tuple[str, ...]:
        answer = (record.verdict.value, str(record.expected), _before(record, base))
        return (record.issue, record.subject, *answer, _cause(record))

    # groupby joins neighbours alone, hence sorted by the same key.
    for _, group in itertools.groupby(sorted(records, key=key), key):
        yield sorted(group, key=lambda record: record.strategy)


def _cause(record: Record) -> str:
    """By what failures of several suites are known to be one; a wrong number is its own issue's."""
    if record.verdict in (Verdict.ERROR, Verdict.HANG, Verdict.BLOCKED):
        failed = next(failures_in(record.evidence), None)
        if failed is not None:
            place = failed.frames[0] if failed.frames else ""
            return f"{failed.classes[0]}: {failed.message[:_FIRST_WORDS]} {place}".strip()
    return record.issue
