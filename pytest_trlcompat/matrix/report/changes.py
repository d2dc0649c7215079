"""What changed since the last published sweep, and since when each verdict stands.

A verdict is compared in the same cell, whose lock names every version, so that a change without another version lies in
this project or in what is no part of a lock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_trlcompat.catalog.evidence import Evidence, Key, MeasuredCell
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.matrix.history import Past

__all__ = ["Change", "Changes", "Standing", "compare"]


@dataclass(frozen=True)
class Standing:
    """Since when a verdict stands.

    Attributes:
        since: the first of the sweeps, up to now, that all gave it; those that did not ask say nothing.
        before: what the sweep before that gave; empty where none has it, so that it may stand for longer.
        until: the day of that sweep.
    """

    since: str
    before: str = ""
    until: str = ""

    def describe(self) -> str:
        """``since 2026-11-22, ok until 2026-11-21``, or ``at least since 2026-11-21``."""
        return (
            f"since {self.since}, {self.before} until {self.until}" if self.before else f"at least since {self.since}"
        )


@dataclass(frozen=True)
class Change:
    """A verdict that is another one than in the last published sweep that has it.

    Attributes:
        versions: what else changed in the cell: ``accelerate 1.3.0 to 1.4.0``; may be empty.
    """

    cell: str
    key: Key
    before: str
    until: str
    now: str
    versions: str = ""

    def describe(self) -> str:
        """One line for people."""
        why = self.versions or "with the same versions of the stack"
        return f"{self.cell}: {', '.join(self.key)}: {self.now}, {self.before} until {self.until}, {why}"


@dataclass(frozen=True)
class Changes:
    """A sweep, held against those that were published before it.

    Attributes:
        last: the day of the newest of them; empty where there is none.
        standing: by cell, since when each of its verdicts stands.
        new_cells: those that no earlier sweep has.
        new_issues: those that no cell of an earlier sweep has.
        problems: files of earlier sweeps that could not be read.
    """

    last: str = ""
    changed: tuple[Change, ...] = ()
    standing: Mapping[str, Mapping[Key, Standing]] = field(default_factory=dict)
    new_cells: tuple[str, ...] = ()
    new_issues: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """One line for people; empty where nothing was published before."""
        if not self.last:
            return ""
        number = len(self.changed)
        verdicts = f"{number} verdicts" if number > 1 else f"{number or 'no'} verdict"
        new = [
            f"{len(names)} {noun}{'s' * (len(names) != 1)}"
            for names, noun in ((self.new_issues, "known issue"), (self.new_cells, "cell"))
            if names
        ]
        fresh = f"; new: {' and '.join(new)}" if new else ""
        return f"since the sweep published on {self.last}, {verdicts} changed{fresh}"

    @property
    def worth_saying(self) -> bool:
        """Whether anything is new or another one."""
        return bool(self.changed or self.new_cells or self.new_issues)

    def of(self, cells: Iterable[str]) -> Changes:
        """What concerns some cells alone."""
        ids = set(cells)
        return dataclasses.replace(
            self,
            changed=tuple(change for change in self.changed if change.cell in ids),
            new_cells=tuple(cell for cell in self.new_cells if cell in ids),
        )

    def to_dict(self) -> dict[str, Any]:
        """For ``compat.json``."""
        return {
            "last": self.last,
            "changed": [dataclasses.asdict(change) for change in self.changed],
            "new_cells": list(self.new_cells),
            "new_issues": list(self.new_issues),
        }


def compare(now: Evidence, past: Past) -> Changes:
    """Hold a sweep against those of the past, of which none is newer; without a cell of it nothing is said."""
    earlier = past.sweeps[::-1]
    if not earlier or not now.cells:
        return Changes(problems=past.problems)
    known = [{cell.id: cell for cell in sweep.cells} for sweep in earlier]
    standing, changed = {}, []
    for cell in now.cells:
        before = [(sweep.date, cells[cell.id]) for sweep, cells in zip(earlier, known, strict=True) if cell.id in cells]
        standing[cell.id], fresh = _standings(cell, now.date, before)
        changed += [_change(cell, key, standing[cell.id][key], before) for key in fresh]
    cells = {name for sweep in known for name in sweep}
    issues = {issue for sweep in known for cell in sweep.values() for issue, *_ in cell.verdicts}
    measured = dict.fromkeys(issue for cell in now.cells for issue, *_ in cell.verdicts)
    return Changes(
        earlier[0].date,
        tuple(changed),
        standing,
        tuple(cell.id for cell in now.cells if cell.id not in cells),
        tuple(issue for issue in measured if issue not in issues),
        past.problems,
    )


def _standings(
    cell: MeasuredCell, date: str, past: Sequence[tuple[str, MeasuredCell]]
) -> tuple[dict[Key, Standing], list[Key]]:
    """Of each verdict, and those that the last sweep which has them gave otherwise."""
    standings: dict[Key, Standing] = {}
    fresh: list[Key] = []
    since: dict[Key, str | None] = dict.fromkeys(cell.verdicts)
    for oldest, newest, before in _stretches(past):
        # From new to old: the first stretch that gave a key another verdict settles it, and it is taken out.
        for key in [key for key in since if key in before.verdicts]:
            if before.gave(key, cell.verdicts[key], cell.blocked_by.get(key, "")):
                since[key] = oldest
                continue
            first = since.pop(key)
            standings[key] = Standing(first or date, _text(before, key), newest)
            # No sweep has given the verdict of now, so it is new since the last one.
            if first is None:
                fresh.append(key)
    alike = {day: Standing(day or date) for day in since.values()}
    return {**{key: alike[day] for key, day in since.items()}, **standings}, fresh


def _stretches(past: Sequence[tuple[str, MeasuredCell]]) -> Iterator[tuple[str, str, MeasuredCell]]:
    """Sweeps, newest first, that follow each other and agree: first day, last day, the cell. Most series are a few."""
    stretch: list[tuple[str, MeasuredCell]] = []
    for day, cell in past:
        if stretch and not _alike(cell, stretch[-1][1]):
            yield stretch[-1][0], stretch[0][0], stretch[0][1]
            stretch = []
        stretch.append((day, cell))
    if stretch:
        yield stretch[-1][0], stretch[0][0], stretch[0][1]


def _alike(cell: MeasuredCell, other: MeasuredCell) -> bool:
    return (cell.verdicts, cell.blocked_by, cell.attributed) == (other.verdicts, other.blocked_by, other.attributed)


def _change(cell: MeasuredCell, key: Key, standing: Standing, past: Sequence[tuple[str, MeasuredCell]]) -> Change:
    before = next(old for day, old in past if day == standing.until)
    return Change(cell.id, key, standing.before, standing.until, _text(cell, key), _versions(before, cell))


def _text(cell: MeasuredCell, key: Key) -> str:
    by = cell.blocked_by.get(key, "")
    verdict = cell.verdicts[key]
    return f"{Verdict.BLOCKED} by {by}" if by else str(verdict)


def _versions(before: MeasuredCell, now: MeasuredCell) -> str:
    packages = dict.fromkeys([*before.versions, *now.versions])
    pairs = ((name, before.versions.get(name, "none"), now.versions.get(name, "none")) for name in packages)
    return ", ".join(f"{name} {old} to {new}" for name, old, new in pairs if old != new)
