"""Candidates: the releases of one package, as the registry lists them."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from pytest_trlcompat.bisect.candidates import Candidate, PreparedCandidate, environment_context, lock_near
from pytest_trlcompat.bisect.errors import BisectError
from pytest_trlcompat.matrix.cells import Cell, Matrix
from pytest_trlcompat.matrix.files import write_whole
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock, lock_for
from pytest_trlcompat.matrix.parsing import parse_pins
from pytest_trlcompat.matrix.uv import find_uv, settings

__all__ = ["Listing", "Range", "Releases", "list_releases", "releases_between"]

_YANKED = re.compile(r"Skipping link: yanked for reason: (?P<reason>.*?): (?P<link>\S+)(?: \(from |$)")
_VERSIONS = re.compile(r"^Available versions: (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Listing:
    """The releases of a package that the registry has for one Python.

    Attributes:
        versions: releases and pre-releases that were not yanked, oldest first.
        yanked: yanked versions with the reason that the registry names, maybe empty.
        day: on which the registry was asked.
    """

    package: str
    versions: tuple[str, ...]
    yanked: dict[str, str]
    day: str

    def to_json(self) -> str:
        return json.dumps({"versions": self.versions, "yanked": self.yanked, "day": self.day}, indent=1) + "\n"


@dataclass(frozen=True)
class Range:
    """The releases that are searched, and those that are not.

    Attributes:
        versions: the two ends and what lies between, oldest first.
        left_out: a line for each yanked release, and one for all pre-releases.
    """

    versions: tuple[str, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class Releases:
    """Releases of ``package`` together with the pins of ``others``.

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

    def prepare(self, candidate: Candidate) -> PreparedCandidate:
        pins = self.pins(candidate.version)
        if self.base is None:
            lock = lock_for(self.matrix, Cell(pins), self.layout)
        else:
            lock = lock_near(self.matrix, candidate.label, pins, self.base)
        return PreparedCandidate(lock.digest, lock, partial(environment_context, lock, self.layout, self.folder))

    def pins(self, version: str) -> dict[str, str]:
        """What a cell with this release pins."""
        # In the order of the matrix's own cells, so that an equal cell has the same id and the same lock.
        return parse_pins(f"{name}={pinned}" for name, pinned in {self.package: version, **self.others}.items())

    def clean_up(self) -> None:
        """Environments stay."""


def list_releases(package: str, python: str, cache: Path) -> Listing:
    """Ask the registry for a package's releases.

    Args:
        cache: a file with the newest listing, which is used if the registry cannot be reached.

    Raises:
        BisectError: when there is neither.
    """
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    command = [
        # uv resolves but does not list. At its highest verbosity pip also names the files that were yanked.
        # pip lists what has a file for the Python that it runs on, so it runs on the one that is meant.
        *(find_uv(), "run", "--quiet", "--no-project", "--isolated", "--python", python, "--with", "pip"),
        *("python", "-m", "pip", "index", "versions", package, "--pre", "-vvv", "--disable-pip-version-check"),
    ]
    done = subprocess.run(command, env=_pip_variables(), capture_output=True, text=True, check=False)
    if done.returncode == 0:
        listing = parse_listing(package, done.stdout + done.stderr, today)
        if listing.versions:
            write_whole(cache, listing.to_json())
            return listing
    if cache.is_file():
        raw = json.loads(cache.read_text(encoding="utf-8"))
        return Listing(package, tuple(raw["versions"]), dict(raw["yanked"]), raw["day"])
    raise BisectError(
        f"the releases of {package} could not be listed: {_reason(done.stderr or done.stdout)}\n"
        "check the network, and the package index that pip uses (pip config list)"
    )


def releases_between(listing: Listing, first: str, last: str, *, pre: bool = False, yanked: bool = False) -> Range:
    """The releases from ``first`` to ``last``; the ends may be pre-releases or yanked.

    Args:
        pre: include pre-releases.
        yanked: include yanked releases.

    Raises:
        BisectError: for an end that the registry does not have, with the versions near it.
    """
    everything = sorted({*listing.versions, *listing.yanked}, key=Version)
    # 1.0 and 1.0.0 are one version: an end is found however it was written.
    by_value = {Version(text): text for text in everything}
    ends = []
    for end in (first, last):
        if Version(end) not in by_value:
            raise BisectError(
                f"the registry has no {listing.package} {end} (as of {listing.day}); "
                f"its nearest releases are {', '.join(_nearest(everything, Version(end)))}"
            )
        ends.append(by_value[Version(end)])
    inside = [text for text in everything if Version(ends[0]) <= Version(text) <= Version(ends[1])]
    left_yanked = [text for text in inside if text in listing.yanked and not yanked and text not in ends]
    left_pre = [
        text
        for text in inside
        if Version(text).is_prerelease and not pre and text not in ends and text not in left_yanked
    ]
    left_out = [f"yanked: {text} ({listing.yanked[text] or 'no reason given'})" for text in left_yanked]
    if left_pre:
        left_out.append(f"pre-releases: {', '.join(left_pre)}")
    return Range(tuple(text for text in inside if text not in left_yanked and text not in left_pre), tuple(left_out))


def _nearest(everything: Sequence[str], version: Version) -> list[str]:
    position = sum(Version(text) < version for text in everything)
    return list(everything[max(0, position - 3) : position + 3]) or ["none"]


def parse_listing(package: str, output: str, day: str) -> Listing:
    """Read what ``pip index versions --pre -vvv`` prints."""
    listed = _VERSIONS.search(output)
    texts = [text.strip() for text in listed[1].split(",")] if listed else []
    versions = sorted((text for text in texts if _version(text) is not None), key=Version)
    yanked: dict[str, str] = {}
    for match in _YANKED.finditer(output):
        version = _version_of_file(match["link"].split("#")[0].rsplit("/", 1)[-1])
        if version is not None and str(version) not in versions:
            reason = match["reason"].strip()
            yanked[str(version)] = "" if reason == "<none given>" else reason
    return Listing(package, tuple(versions), yanked, day)


def _pip_variables() -> dict[str, str]:
    child = settings(os.environ)
    # An index that is set for uv alone is meant for pip as well.
    if "UV_DEFAULT_INDEX" in child:
        child.setdefault("PIP_INDEX_URL", child["UV_DEFAULT_INDEX"])
    return child


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def _version_of_file(name: str) -> Version | None:
    try:
        return parse_wheel_filename(name)[1] if name.endswith(".whl") else parse_sdist_filename(name)[1]
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None


def _reason(output: str) -> str:
    telling = re.compile(
        r"^(?:ERROR:|WARNING: Retrying|error:)|^\s+Caused by:|Could not|network|No matching", re.IGNORECASE
    )
    lines = [line.strip() for line in output.splitlines() if telling.search(line)]
    return " / ".join(dict.fromkeys(lines[-3:])) or "pip gave no reason"
