"""Asks the registry for releases: their days, whether they were yanked, and what they declare to require.

``pypi_simple`` speaks to the index that pip uses; ``remotezip`` reads the metadata within a wheel and downloads no more
of it, since not every index serves metadata apart.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Iterator

import requests
from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pypi_simple import PYPI_SIMPLE_ENDPOINT, DistributionPackage, NoSuchProjectError, PyPISimple
from remotezip import RemoteZip

from pytest_trlcompat.matrix.covering.releases import PACKAGES, Listing, Release, counts
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.uv import settings

__all__ = ["Files", "ask", "client", "files_of", "installable", "upload_day"]

Files = list[DistributionPackage]


def ask(first: str, python: str) -> Listing:
    """Every release of TRL from ``first`` on, and of the others the newest patch of each minor release since its day.

    Pre-releases, yanked ones and those for other Pythons are left out.

    Raises:
        MatrixError: the registry cannot be reached, does not have ``first`` or a package, or does not say when
            something was uploaded.
    """
    with client() as index:
        files = {package: files_of(index, package, python) for package in PACKAGES}
        if Version(first) not in files["trl"]:
            raise MatrixError(f"the registry has no trl {first}")
        since = upload_day(files["trl"][Version(first)])
        releases = {}
        for package in PACKAGES:
            versions = [version for version in files[package] if version >= Version(first)]
            if package != "trl":
                days = {version: upload_day(files[package][version]) for version in _newest_patches(files[package])}
                versions = [version for version, day in days.items() if day >= since]
            releases[package] = tuple(
                _release(package, version, files[package][version], python) for version in sorted(versions)
            )
    return Listing(datetime.datetime.now(datetime.timezone.utc).date(), releases)


def client() -> PyPISimple:
    """A client of the index that pip and uv use."""
    return PyPISimple(settings(os.environ).get("UV_DEFAULT_INDEX", PYPI_SIMPLE_ENDPOINT))


def files_of(index: PyPISimple, package: str, python: str, *, prereleases: bool = False) -> dict[Version, Files]:
    """The files of a package that :func:`installable` takes, asked of the index.

    Raises:
        MatrixError: the index cannot be reached, does not have the package, or says what is no range of versions.
    """
    try:
        return installable(index.get_project_page(package).packages, python, prereleases=prereleases)
    except (requests.RequestException, ValueError, NoSuchProjectError) as error:
        raise MatrixError(
            f"the package index could not be asked for {package}: {error}; check the network and the index that pip "
            "uses (pip config list)"
        ) from error


def installable(
    packages: Iterable[DistributionPackage], python: str, *, prereleases: bool = False
) -> dict[Version, Files]:
    """The files of each release that were not yanked and are for this Python."""
    files: dict[Version, Files] = {}
    for file in packages:
        try:
            version = Version(file.version or "")
        # An index keeps files that were uploaded before versions had to follow PEP 440.
        except InvalidVersion:
            continue
        runs = file.requires_python is None or python in SpecifierSet(file.requires_python)
        if (prereleases or not version.is_prerelease) and not file.is_yanked and runs:
            files.setdefault(version, []).append(file)
    return files


def _newest_patches(versions: Iterable[Version]) -> Iterator[Version]:
    newest: dict[tuple[int, ...], Version] = {}
    for version in versions:
        newest[version.release[:2]] = max(version, newest.get(version.release[:2], version))
    yield from newest.values()


def _release(package: str, version: Version, files: Files, python: str) -> Release:
    return Release(package, str(version), upload_day(files), tuple(_requires(files, python)))


def upload_day(files: Files) -> datetime.date:
    """The day of the first of a release's files.

    Raises:
        MatrixError: the index does not say when it was uploaded.
    """
    # A release can be installed from its first file on; wheels may be added for years.
    days = [file.upload_time.date() for file in files if file.upload_time is not None]
    if not days:
        raise MatrixError(f"the package index does not say when {files[0].filename} was uploaded")
    return min(days)


def _requires(files: Files, python: str) -> Iterator[str]:
    """The requirements on other packages of a cell."""
    wheel = next((file for file in files if file.package_type == "wheel"), None)
    # DeepSpeed is published as sources alone, which declare nothing before they are built.
    if wheel is None:
        return
    with RemoteZip(wheel.url) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata, _ = parse_email(archive.read(name))
    for requirement in map(Requirement, metadata.get("requires_dist", [])):
        if canonicalize_name(requirement.name) in PACKAGES and requirement.specifier and counts(requirement, python):
            yield str(requirement)
