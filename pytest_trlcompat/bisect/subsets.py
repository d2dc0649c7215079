"""Candidates: one lock with some packages at another lock's versions.

Imports only the standard library and the matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pytest_trlcompat.bisect.candidates import Candidate, Prepared
from pytest_trlcompat.bisect.resolving import environment_place, exactly, near
from pytest_trlcompat.matrix.cells import Matrix
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock

__all__ = ["Subsets"]


@dataclass(frozen=True)
class Subsets:
    """``before`` with packages moved to the versions that they have in ``after``.

    Attributes:
        strict: nothing else may move, so that a set is tested alone or not at all; else what must move moves.
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

    def candidate(self, moved: Iterable[str]) -> Candidate:
        names = sorted(moved)
        what = ", ".join(f"{name} {self.after.packages[name]}" for name in names)
        how = "exactly" if self.strict else "near"
        key = f"{how} {self.before.digest} with {' '.join(f'{name}=={self.after.packages[name]}' for name in names)}"
        return Candidate(key, ",".join(names), f"only {what}")

    def prepare(self, candidate: Candidate) -> Prepared:
        moved = {name: self.after.packages[name] for name in candidate.version.split(",")}
        date = max(self.before.date, self.after.date)
        if self.strict:
            lock = exactly(self.matrix, candidate.label, {**self.before.packages, **moved}, date)
        else:
            base = Lock(candidate.label, date, self.before.python, self.before.packages, self.before.asked)
            lock = near(self.matrix, candidate.label, moved, base)
        return Prepared(lock.digest, lock, partial(environment_place, lock, self.layout, self.folder))

    def tidy(self) -> None:
        """Environments stay."""
