"""Candidates: the releases of one package. Imports only the standard library, ``packaging`` and the matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from packaging.version import Version

from pytest_trlcompat.bisect.candidates.base import Candidate, Prepared, environment_place, near
from pytest_trlcompat.bisect.candidates.registry import Listing
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock, lock_for
from pytest_trlcompat.matrix.parsing import parse_pins

__all__ = ["Range", "Releases", "between"]


@dataclass(frozen=True)
class Range:
    """The releases that are searched, and those that are not.

    Attributes:
        versions: the two ends and what lies between, oldest first.
        left_out: a line for each kind that was passed by.
    """

    versions: tuple[str, ...]
    left_out: tuple[str, ...]


def between(listing: Listing, first: str, last: str, *, pre: bool = False, yanked: bool = False) -> Range:
    """The releases from ``first`` to ``last``; both ends are taken whatever they are.

    Args:
        pre: take pre-releases.
        yanked: take withdrawn releases.

    Raises:
        BisectError: for an end that the registry does not have, with the versions near it.
    """
    everything = sorted({*listing.versions, *listing.yanked}, key=Version)
    by_value = {Version(text): text for text in everything}
    ends = []
    for end in (first, last):
        if Version(end) not in by_value:
            raise BisectError(
                f"{listing.package} {end} is unknown to the registry (as of {listing.day}); "
                f"near it are {', '.join(_near(everything, Version(end)))}"
            )
        ends.append(by_value[Version(end)])
    inside = [text for text in everything if Version(ends[0]) <= Version(text) <= Version(ends[1])]
    withdrawn = [text for text in inside if text in listing.yanked and not yanked and text not in ends]
    early = [
        text
        for text in inside
        if Version(text).is_prerelease and not pre and text not in ends and text not in withdrawn
    ]
    left_out = [f"yanked: {text} ({listing.yanked[text] or 'no reason given'})" for text in withdrawn]
    if early:
        left_out.append(f"pre-releases: {', '.join(early)}")
    return Range(tuple(text for text in inside if text not in withdrawn and text not in early), tuple(left_out))


def _near(everything: Sequence[str], version: Version) -> list[str]:
    place = sum(Version(text) < version for text in everything)
    return list(everything[max(0, place - 3) : place + 3]) or ["none"]


@dataclass(frozen=True)
class Releases:
    """Releases of ``package`` beside the pins of ``others``.

    Attributes:
        base: the rest of the stack is this lock's, moved only where it must; ``None``: each release gets the rest of
            the stack as of its own date, and shares its environment with the matrix.
    """

    matrix: Matrix
    layout: Layout
    package: str
    versions: Sequence[str]
    others: Mapping[str, str]
    folder: Path
    base: Lock | None = None

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        return tuple(self.candidate(version) for version in self.versions)

    def candidate(self, version: str) -> Candidate:
        others = " ".join(f"{name}=={other}" for name, other in sorted(self.others.items()))
        rest = "dated" if self.base is None else f"near {self.base.digest}"
        return Candidate(f"{self.package}=={version} {others} {rest}", version, f"{self.package} {version}")

    def prepare(self, candidate: Candidate) -> Prepared:
        pins = self.pins(candidate.version)
        if self.base is None:
            lock = lock_for(self.matrix, Cell(pins), self.layout)
        else:
            lock = near(self.matrix, candidate.label, pins, self.base)
        return Prepared(lock.digest, lock, partial(environment_place, lock, self.layout, self.folder))

    def pins(self, version: str) -> dict[str, str]:
        """In the order of a cell that was written down, so that it has the same id and the same kept lock."""
        return parse_pins(f"{name}={pinned}" for name, pinned in {self.package: version, **self.others}.items())

    def tidy(self) -> None:
        """Environments stay."""
