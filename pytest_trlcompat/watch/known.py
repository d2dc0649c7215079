"""What is known: the releases that some published sweep has measured, and the newest stack that it has.

That a cell, a lock or a list names a release does not make it known: it may never have been run.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from packaging.version import Version

from pytest_trlcompat.catalog import evidence
from pytest_trlcompat.catalog.evidence import EvidenceError, MeasuredCell
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.matrix import history, locks
from pytest_trlcompat.matrix.cells import Cell, Matrix, age
from pytest_trlcompat.matrix.covering.releases import Release
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
        versions: of each package, those that were measured.
        base: the newest stack that was measured, in which each new release is tried alone.
    """

    versions: Versions
    base: Lock

    def previous(self, package: str, version: str) -> str:
        """The newest known release that is older than this one; empty where there is none."""
        older = [release for release in self.versions.get(package, ()) if release < Version(version)]
        return str(max(older)) if older else ""


def known_now(matrix: Matrix, layout: Layout) -> Known:
    """What the published sweeps of a checkout have measured, and the newest stack among its cells that they have.

    Raises:
        MatrixError: when no cell has both TRL and Transformers, its lock is missing, or nothing was published.
    """
    published = _published(layout)
    return Known(_versions(published), _newest(matrix, layout, published))


def known_before(matrix: Matrix, index: Index, day: datetime.date) -> Known:
    """What a matrix that was kept up to ``day`` would have known: all that the index had when that day began.

    Raises:
        Untestable: when nothing can be resolved as of that day, with the resolver's reason.
    """
    versions = {package: frozenset(releases) for package, releases in index.before(day).versions().items()}
    return Known(versions, locks.resolve(matrix, Cell({}, day)))


def new_releases(index: Index, versions: Versions) -> list[Release]:
    """The releases that are newer than all known ones of their package: by their number, or by their day.

    So a patch of an older series is new where it came out after the newest known release, and what the matrix has left
    out on purpose is not. Of a package of which nothing is known, nothing is new.
    """
    return [
        release for package, releases in index.releases.items() for release in _new(releases, versions.get(package, ()))
    ]


def _new(releases: Iterable[Release], known: Iterable[Version]) -> list[Release]:
    have = frozenset(known)
    if not have:
        return []
    days = [release.day for release in releases if Version(release.version) in have]
    # Where the index has none of the known releases, no day makes another one new.
    last = max(days, default=datetime.date.max)
    return [
        release
        for release in releases
        if Version(release.version) not in have and (Version(release.version) > max(have) or release.day > last)
    ]


def _published(layout: Layout) -> list[MeasuredCell]:
    """The cells of every published sweep, those of ``evidence/`` too; what cannot be read there costs the others
    nothing.

    Raises:
        MatrixError: the published evidence is missing, or cannot be read.
    """
    try:
        newest = evidence.load(layout.evidence)
    except EvidenceError as error:
        raise MatrixError(
            f"nothing is known to be measured, so that nothing can be called new: {error}; restore the file"
        ) from error
    return [cell for sweep in (newest, *history.read(layout.history).sweeps) for cell in sweep.cells]


def _versions(cells: Iterable[MeasuredCell]) -> Versions:
    """Of each package the releases of which some verdict was published: a cell, a lock or a list is no measurement."""
    versions: dict[str, set[Version]] = {package: set() for package in REQUIRED}
    for cell in cells:
        if any(verdict is not Verdict.UNTESTABLE for verdict in cell.verdicts.values()):
            for package in versions.keys() & cell.versions.keys():
                versions[package].add(Version(cell.versions[package]))
    return {package: frozenset(releases) for package, releases in versions.items()}


def _newest(matrix: Matrix, layout: Layout, published: Iterable[MeasuredCell]) -> Lock:
    whole = [cell for cell in matrix.cells if set(cell.pins) == {"trl", "transformers"} and cell.python is None]
    if not whole:
        raise MatrixError(
            f"{layout.matrix} has no cell that pins trl and transformers alone, so there is no newest known stack in "
            "which a new release could be tried"
        )
    measured = {cell.id for cell in published if cell.verdicts}
    newest = max([cell for cell in whole if cell.id in measured] or whole, key=age)
    lock = locks.kept(matrix, newest, layout)
    if lock is None:
        raise MatrixError(
            f"{newest.id}, the newest cell, has no lock, or an outdated one; make it with: nox -s lock -- {newest.id}"
        )
    return lock
