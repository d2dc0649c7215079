"""What a watch has found out about a day, as its page and its JSON show it."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_trlcompat.catalog.verdict import Record
from pytest_trlcompat.matrix.covering.releases import Release
from pytest_trlcompat.matrix.report.model import CellReport
from pytest_trlcompat.watch.changes import Change, Kind
from pytest_trlcompat.watch.commits import WatchedCommit
from pytest_trlcompat.watch.narrowing import Narrowed
from pytest_trlcompat.watch.plan import WatchedCell

__all__ = ["Cause", "Outcome"]


@dataclass(frozen=True)
class Cause:
    """Changes that come from one thing: the same failure, or one known issue, with the same release.

    Attributes:
        narrowed: what a bisection of the first change found; ``None`` where none was run.
        not_narrowed: why none was run.
    """

    changes: tuple[Change, ...]
    narrowed: Narrowed | None = None
    not_narrowed: str = ""

    @property
    def first(self) -> Change:
        return self.changes[0]

    @property
    def kind(self) -> Kind:
        return self.first.kind


@dataclass(frozen=True)
class Outcome:
    """A day.

    Attributes:
        since: of a watch on a past, the day to which matrix and catalogue are cut back.
        new: the releases that the matrix does not know.
        commits: those of local clones that were tried like new releases.
        plan: the cells that follow, and the one that they are held against, where that had to be measured.
        cells: those with results, by id.
        base: the cell that they are held against.
        known_wrong: verdicts of that cell that nothing predicts: the catalogue is wrong there already.
        causes: what changed.
        remarks: what the sources of each new release say.
        left: what is missing of the plan, and why: cells that were not measured, bisections that found nothing; a later
            command tries it again.
        due: how many cells and bisections the plan asks for; a plan of nothing is never complete.
        patch: what a person may apply, as ``git apply`` reads it; empty where there is nothing.
        by_hand: what a person must write, since a patch cannot.
    """

    day: datetime.date
    since: datetime.date | None
    new: tuple[Release, ...]
    plan: tuple[WatchedCell, ...]
    cells: Mapping[str, CellReport]
    base: str = ""
    known_wrong: tuple[Record, ...] = ()
    causes: tuple[Cause, ...] = ()
    commits: tuple[WatchedCommit, ...] = ()
    remarks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    due: int = 0
    patch: str = ""
    by_hand: tuple[str, ...] = ()

    def of_kind(self, *kinds: Kind, ours: bool = False) -> list[Cause]:
        """Causes of these kinds, of upstream or of this project."""
        return [cause for cause in self.causes if cause.kind in kinds and cause.first.is_ours is ours]

    @property
    def broke(self) -> list[Cause]:
        return self.of_kind(Kind.BROKE)

    @property
    def changed(self) -> list[Cause]:
        return self.of_kind(Kind.CHANGED)

    @property
    def cured(self) -> list[Cause]:
        return self.of_kind(Kind.CURED)

    @property
    def ours(self) -> list[Cause]:
        """Corrected trainers that are not right with a new release."""
        return self.of_kind(*Kind, ours=True)

    @property
    def is_complete(self) -> bool:
        return self.due > 0 and not self.left

    @property
    def summary(self) -> str:
        """One line."""
        verdicts = sum(len(cell.verdicts) for cell in self.cells.values())
        counted = [(len(self.new), "new release"), (len(self.cells), "cell"), (verdicts, "verdict")]
        if self.commits:
            counted.insert(1, (len(self.commits), "commit"))
        parts = [
            ", ".join(_count(number, noun) for number, noun in counted),
            f"{len(self.broke)} broke, {len(self.cured)} cured",
        ]
        if self.changed:
            parts.append(f"{len(self.changed)} changed")
        if self.ours:
            parts.append(f"{_count(len(self.ours), 'cure')} not right")
        if self.left:
            parts.append(f"{len(self.left)} not reached")
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "day": self.day.isoformat(),
            "since": self.since.isoformat() if self.since else None,
            "complete": self.is_complete,
            "new": [{"package": r.package, "version": r.version, "day": r.day.isoformat()} for r in self.new],
            "commits": [
                {"package": c.package, "version": c.wheel.version, "sha": c.commit.sha, "day": c.commit.day}
                for c in self.commits
            ],
            "base": self.base,
            "cells": {
                watched.cell.id: {
                    "about": watched.about,
                    "stack": dict(watched.stack),
                    "state": self.cells[watched.cell.id].sidecar.state if watched.cell.id in self.cells else None,
                    "seconds": self.cells[watched.cell.id].sidecar.seconds if watched.cell.id in self.cells else None,
                    "verdicts": len(self.cells[watched.cell.id].verdicts) if watched.cell.id in self.cells else 0,
                }
                for watched in self.plan
            },
            "known_wrong": [_record(record) for record in self.known_wrong],
            "changes": [_change(change, cause) for cause in self.causes for change in cause.changes],
            "remarks": {name: list(lines) for name, lines in self.remarks.items()},
            "left": list(self.left),
            "patch": bool(self.patch),
            "by_hand": list(self.by_hand),
        }


def _change(change: Change, cause: Cause) -> dict[str, Any]:
    narrowed = cause.narrowed
    return {
        "kind": change.kind.value,
        "cell": change.cell.cell.id,
        "release": str(change.cell.release or ""),
        "issue": change.issue,
        "subject": change.subject,
        "strategies": list(change.strategies),
        "verdict": change.record.verdict.value,
        "expected": change.record.expected.value if change.record.expected else None,
        "bisected": narrowed.verdict if narrowed is not None else "",
        "not_bisected": cause.not_narrowed or (narrowed.reason if narrowed is not None else ""),
    }


def _record(record: Record) -> dict[str, Any]:
    return {
        "issue": record.issue,
        "subject": record.subject,
        "strategy": record.strategy,
        "verdict": record.verdict.value,
        "expected": record.expected.value if record.expected else None,
    }


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
