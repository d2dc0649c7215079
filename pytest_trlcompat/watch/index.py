"""What the package index has of the stack, and when it came."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from packaging.version import Version

from pytest_trlcompat.matrix.covering import registry
from pytest_trlcompat.matrix.covering.releases import Release

__all__ = ["Ask", "Index", "ask"]


@dataclass(frozen=True)
class Index:
    """The releases of some packages of the stack, each package's from old to new by version."""

    releases: Mapping[str, tuple[Release, ...]]

    def before(self, day: datetime.date) -> Index:
        """What it had when that day began, as uv's ``--exclude-newer`` sees it."""
        return self._only(lambda release: release.day < day)

    def since(self, day: datetime.date) -> Index:
        """What it got on that day and afterwards."""
        return self._only(lambda release: release.day >= day)

    def versions(self) -> dict[str, tuple[Version, ...]]:
        """Package to versions, oldest first."""
        return {
            package: tuple(Version(release.version) for release in releases)
            for package, releases in self.releases.items()
        }

    def all(self) -> list[Release]:
        """Every release, by package."""
        return [release for releases in self.releases.values() for release in releases]

    def _only(self, keep: Callable[[Release], bool]) -> Index:
        return Index({package: tuple(filter(keep, releases)) for package, releases in self.releases.items()})


Ask = Callable[[Iterable[str], str, bool], Index]


def ask(packages: Iterable[str], python: str, prereleases: bool) -> Index:
    """Ask the index, once for each package: for releases that were not yanked and have a file for this Python.

    Raises:
        MatrixError: the index cannot be reached, does not have a package, or does not say when a file was uploaded.
    """
    releases: dict[str, tuple[Release, ...]] = {}
    with registry.client() as index:
        for package in packages:
            files = registry.files_of(index, package, python, prereleases=prereleases)
            releases[package] = tuple(
                Release(package, str(version), registry.upload_day(files[version])) for version in sorted(files)
            )
    return Index(releases)
