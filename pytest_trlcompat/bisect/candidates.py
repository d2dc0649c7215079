"""Candidates, and what a source of them must be able to do. Imports only the standard library and the matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from pytest_trlcompat.bisect.place import Place
from pytest_trlcompat.matrix.locks import Lock

__all__ = ["Candidate", "Prepared", "Source"]


@dataclass(frozen=True)
class Candidate:
    """One point of the ordered list that is searched.

    Attributes:
        key: unique among all candidates of all sources that a journal may see.
        version: as the result names it: ``4.51.3``, ``2025-05-20``, a commit.
        label: as people read it: ``transformers 4.51.3``.
    """

    key: str
    version: str
    label: str


@dataclass(frozen=True)
class Prepared:
    """A candidate whose versions are known.

    Attributes:
        identity: of all that an observation depends on beside the predicate. Candidates of equal identity (two days
            without a release between them) are tested once.
        lock: ``None`` for commits of a repository that is no package of the stack.
        place: makes it ready to run in, and takes away afterwards what only this candidate needed.
    """

    identity: str
    lock: Lock | None
    place: Callable[[Callable[[str], None]], AbstractContextManager[Place]]


class Source(Protocol):
    """An ordered list of candidates."""

    @property
    def candidates(self) -> Sequence[Candidate]: ...

    def prepare(self, candidate: Candidate) -> Prepared:
        """Find every version.

        Raises:
            Untestable: when that cannot be; the text is the reason.
        """
        ...

    def tidy(self) -> None:
        """Take away what a worker that was stopped has left."""
        ...
