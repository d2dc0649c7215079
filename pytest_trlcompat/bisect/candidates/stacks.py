"""Candidates: whole stacks, as the registry was on each day, or one lock with some packages of another."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from pytest_trlcompat.bisect.candidates import (
    Candidate,
    PreparedCandidate,
    environment_context,
    lock_exactly,
    lock_near,
)
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock, resolve

__all__ = ["Days", "PartialUpdates"]


@dataclass(frozen=True)
class Days:
    """Every day from ``first`` to ``last``; what is not pinned by ``others`` is what the registry had before that day.

    As in the matrix, torch and packages that are needed only for building are those of today.
    """

    matrix: Matrix
    layout: Layout
    first: datetime.date
    last: datetime.date
    others: Mapping[str, str]
    folder: Path

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        count = (self.last - self.first).days + 1
        return tuple(self._candidate(self.first + datetime.timedelta(days=number)) for number in range(count))

    def _candidate(self, day: datetime.date) -> Candidate:
        others = " ".join(f"{name}=={version}" for name, version in sorted(self.others.items()))
        return Candidate(f"as of {day} {others}", day.isoformat(), f"the stack of {day}")

    def prepare(self, candidate: Candidate) -> PreparedCandidate:
        day = datetime.date.fromisoformat(candidate.version)
        lock = dataclasses.replace(resolve(self.matrix, Cell(dict(self.others), day)), cell_id=candidate.label)
        return PreparedCandidate(lock.digest, lock, partial(environment_context, lock, self.layout, self.folder))

    def clean_up(self) -> None:
        """Environments stay."""


@dataclass(frozen=True)
class PartialUpdates:
    """``before`` with some packages updated to the versions that they have in ``after``.

    Attributes:
        strict: nothing else may move, so that a set is tested alone or not at all; otherwise what must move moves.
    """

    matrix: Matrix
    layout: Layout
    before: Lock
    after: Lock
    folder: Path
    strict: bool = True

    @property
    def candidates(self) -> Sequence[Candidate]:
        return ()

    def candidate(self, updated: Iterable[str]) -> Candidate:
        names = sorted(updated)
        label = ", ".join(f"{name} {self.after.packages[name]}" for name in names)
        how = "exactly" if self.strict else "near"
        key = f"{how} {self.before.digest} with {' '.join(f'{name}=={self.after.packages[name]}' for name in names)}"
        return Candidate(key, ",".join(names), f"only {label}")

    def prepare(self, candidate: Candidate) -> PreparedCandidate:
        updated = {name: self.after.packages[name] for name in candidate.version.split(",")}
        date = max(self.before.date, self.after.date)
        if self.strict:
            lock = lock_exactly(self.matrix, candidate.label, {**self.before.packages, **updated}, date)
        else:
            base = dataclasses.replace(self.before, cell_id=candidate.label, date=date)
            lock = lock_near(self.matrix, candidate.label, updated, base)
        return PreparedCandidate(lock.digest, lock, partial(environment_context, lock, self.layout, self.folder))

    def clean_up(self) -> None:
        """Environments stay."""
