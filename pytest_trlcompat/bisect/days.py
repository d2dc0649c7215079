"""Candidates: the whole stack as the registry stood on each day. Imports only the standard library and the matrix."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from pytest_trlcompat.bisect.candidates import Candidate, Prepared
from pytest_trlcompat.bisect.resolving import environment_place
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import resolve

__all__ = ["Days"]


@dataclass(frozen=True)
class Days:
    """Every day from ``first`` to ``last``; what is not pinned by ``others`` is what the registry had before that day.

    As everywhere, packages that only build and torch are taken as they are today.
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

    def prepare(self, candidate: Candidate) -> Prepared:
        day = datetime.date.fromisoformat(candidate.version)
        lock = dataclasses.replace(resolve(self.matrix, Cell(dict(self.others), day)), cell_id=candidate.label)
        return Prepared(lock.digest, lock, partial(environment_place, lock, self.layout, self.folder))

    def tidy(self) -> None:
        """Environments stay."""
