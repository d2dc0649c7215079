"""What the matrix knows: the releases that some cell or list names, and the newest stack among its cells.

Imports the matrix alone.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from packaging.version import Version

from pytest_trlcompat.matrix import locks
from pytest_trlcompat.matrix.cells import Cell, Matrix, age
from pytest_trlcompat.matrix.covering.releases import Release, read_listing
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock
from pytest_trlcompat.stack import REQUIRED
from pytest_trlcompat.watch.index import Index

__all__ = ["Known", "known_before", "known_now", "new_releases"]

Versions = Mapping[str, frozenset[Version]]


@dataclass(frozen=True)
class Known:
    """What is not new.

    Attributes:
        versions: of each package.
        base: the newest stack that was measured, in which each new release is tried alone.
    """

    versions: Versions
    base: Lock

    def previous(self, package: str, version: str) -> str:
        """The newest known release that is older than this one; empty where there is none."""
        older = [each for each in self.versions.get(package, ()) if each < Version(version)]
        return str(max(older)) if older else ""


def known_now(matrix: Matrix, layout: Layout) -> Known:
    """What ``matrix.toml``, the locks and ``releases.toml`` of a checkout name.

    Raises:
        MatrixError: when no cell has both TRL and Transformers, or its lock is missing.
    """
    return Known(_versions(matrix, layout), _newest(matrix, layout))


def known_before(matrix: Matrix, index: Index, day: datetime.date) -> Known:
    """What a matrix that was kept up to ``day`` would have known: all that the index had when that day began.

    Raises:
        Untestable: when nothing can be resolved as of that day, with the resolver's reason.
    """
    versions = {package: frozenset(found) for package, found in index.before(day).versions().items()}
    return Known(versions, locks.resolve(matrix, Cell({}, day)))


def new_releases(index: Index, versions: Versions) -> list[Release]:
    """The releases that are newer than all known ones of their package: by their number, or by their day.

    So a patch of an older series is new where it came out after the newest known release, and what the matrix has left
    out on purpose is not. Of a package of which nothing is known, nothing is new.
    """
    return [release for package, found in index.releases.items() for release in _new(found, versions.get(package, ()))]


def _new(found: Iterable[Release], known: Iterable[Version]) -> list[Release]:
    have = frozenset(known)
    if not have:
        return []
    days = [release.day for release in found if Version(release.version) in have]
    last = max(days, default=datetime.date.max)
    return [
        release
        for release in found
        if Version(release.version) not in have and (Version(release.version) > max(have) or release.day > last)
    ]


def _versions(matrix: Matrix, layout: Layout) -> Versions:
    named = [matrix.pins, *(cell.pins for cell in matrix.cells)]
    named += [locks.read_lock(path).packages for path in sorted(layout.locks.glob("*.txt"))]
    listed = read_listing(layout.releases).releases if layout.releases.is_file() else {}
    found: dict[str, set[Version]] = {package: set() for package in REQUIRED}
    for pins in named:
        for package in found.keys() & pins.keys():
            found[package].add(Version(pins[package]))
    for package, releases in listed.items():
        found[package].update(Version(release.version) for release in releases)
    found["torch"].update(map(Version, matrix.torch))
    return {package: frozenset(versions) for package, versions in found.items()}


def _newest(matrix: Matrix, layout: Layout) -> Lock:
    whole = [cell for cell in matrix.cells if set(cell.pins) == {"trl", "transformers"} and cell.python is None]
    if not whole:
        raise MatrixError(
            f"{layout.matrix} has no cell that pins trl and transformers alone, so there is no newest known stack in "
            "which a new release could be tried"
        )
    newest = max(whole, key=age)
    lock = locks.kept(matrix, newest, layout)
    if lock is None:
        raise MatrixError(
            f"{newest.id}, the newest cell, has no lock, or an outdated one; make it with: nox -s lock -- {newest.id}"
        )
    return lock
