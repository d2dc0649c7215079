"""Releases of the packages that a cell pins, what they require of each other, and the file that lists them."""

from __future__ import annotations

import datetime
import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.parsing import parse_day

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["PACKAGES", "Listing", "Release", "allows", "counts", "minor", "read_listing"]

PACKAGES = ("trl", "transformers", "accelerate", "deepspeed", "peft")
"""The columns of the arrays."""

_HEAD = (
    "# The releases from which the cells of `nox -s matrix -- --pairwise` are chosen: of TRL every one, of the other",
    "# packages the newest patch of each minor release, and what they require of each other. DeepSpeed is published",
    "# as sources alone, which declare nothing before they are built. Made by `nox -s pairwise`.",
)


@dataclass(frozen=True)
class Release:
    """One release on the registry.

    Attributes:
        day: of the upload of its first file.
        requires: what it declares to require of :data:`PACKAGES`, as in its metadata, extras included.
    """

    package: str
    version: str
    day: datetime.date
    requires: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


@dataclass(frozen=True)
class Listing:
    """What the registry has, oldest release first.

    Attributes:
        day: on which it was asked.
        releases: of TRL every one, of the other packages the newest patch of each minor release.
    """

    day: datetime.date
    releases: Mapping[str, tuple[Release, ...]]

    def to_text(self) -> str:
        lines = [
            *_HEAD,
            f"day = {self.day.isoformat()}",
        ]
        for package in PACKAGES:
            lines += ["", f"[{package}]"]
            for release in self.releases[package]:
                needs = f", requires = [{', '.join(map(_quoted, release.requires))}]" if release.requires else ""
                lines.append(f'"{release.version}" = {{ day = {release.day.isoformat()}{needs} }}')
        return "\n".join([*lines, ""])


def read_listing(path: Path) -> Listing:
    """Read what :meth:`Listing.to_text` wrote.

    Raises:
        MatrixError: the file is missing or damaged.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        releases = {package: tuple(_releases(package, raw[package])) for package in PACKAGES}
        return Listing(parse_day(raw["day"]), releases)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MatrixError) as error:
        raise MatrixError(f"{path}: no list of releases ({error!r}); make it again with: nox -s pairwise") from error


def _releases(package: str, raw: Mapping[str, Any]) -> list[Release]:
    releases = []
    for text, entry in raw.items():
        requires = tuple(entry.get("requires", ()))
        for requirement in requires:
            # Parsed for its error alone: a damaged requirement is reported with the file's name.
            Requirement(requirement)
        releases.append(Release(package, str(Version(text)), parse_day(entry["day"]), requires))
    return sorted(releases, key=lambda release: Version(release.version))


def minor(version: str) -> tuple[int, ...]:
    """``(4, 56)`` of ``4.56.2``."""
    return Version(version).release[:2]


def allows(release: Release, other: Release, python: str) -> bool:
    """Whether what a release declares to require admits another one; see :func:`counts`."""
    return all(
        # A specifier refuses a pre-release unless it names one itself; the listing has none.
        Version(other.version) in requirement.specifier
        for requirement in _requirements(release.requires)
        if requirement.name == other.package and counts(requirement, python)
    )


def counts(requirement: Requirement, python: str) -> bool:
    """Whether a requirement holds in a cell on this Python.

    One of an extra does where that has the name of a package of the cell: ``trl[deepspeed]`` says with which DeepSpeed
    TRL works.
    """
    # The cell's, since packaging fills in what is missing from the interpreter that runs this.
    machine = {
        "python_version": ".".join(python.split(".")[:2]),
        "python_full_version": python if python.count(".") > 1 else f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
    }
    marker = requirement.marker
    return marker is None or any(marker.evaluate({**machine, "extra": extra}) for extra in ("", *PACKAGES))


@functools.cache
def _requirements(texts: tuple[str, ...]) -> tuple[Requirement, ...]:
    return tuple(map(Requirement, texts))


def _quoted(text: str) -> str:
    """A requirement as a string of TOML: it has double quotes in its markers, and no single ones."""
    if "'" in text:
        raise MatrixError(f"the requirement {text!r} cannot be written as a literal string of TOML")
    return f"'{text}'"
