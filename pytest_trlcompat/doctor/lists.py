"""Reading requirements files and the output of ``pip freeze``.

What pip accepts is accepted: comments, continued lines, hashes, markers, ``-r`` and ``-c``, editables, URLs, byte order
marks. Only the packages of the stack are looked at.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from pytest_trlcompat.catalog.ranges import ALL
from pytest_trlcompat.doctor.files import Files, decoded
from pytest_trlcompat.doctor.requirements import LIKE, Listing, mention
from pytest_trlcompat.doctor.sources import displayed, read_source
from pytest_trlcompat.doctor.stack_spec import Mention, StackSpecError
from pytest_trlcompat.stack import PACKAGES, package_of

__all__ = ["read_listing"]

_INCLUDES = re.compile(r"(?:(?:-r|-c)\s*|(?:--requirement|--constraint)(?:\s+|=))(?P<path>\S.*)")
_EDITABLE = re.compile(r"(?:-e\s*|--editable(?:\s+|=))(?P<what>\S.*)")
_OPTIONS = re.compile(
    r"(?:-i|-f|--index-url|--extra-index-url|--no-index|--find-links|--no-binary|--only-binary|--prefer-binary|--pre"
    r"|--require-hashes|--trusted-host|--use-feature)\b"
)
_REQUIREMENT_OPTIONS = re.compile(r"\s--(?:hash|config-settings?|global-option|no-deps)\b.*$")
_COMMENT = re.compile(r"(?:^|\s)#.*$")
_FROZEN_EDITABLE = re.compile(r"# Editable [^()]*\((?P<name>[\w.-]+)==(?P<version>[^\s()]+)\)")
"""What pip freeze writes above ``-e /some/folder``, which itself says neither name nor version."""
_URL = re.compile(r"(?:[a-z][a-z+]*:|\.{0,2}/)", re.IGNORECASE)
_FILE = re.compile(r"[^\s=<>;@]+\.(?:whl|tar\.(?:gz|bz2|xz|Z)|tar|tgz|tbz|zip)(?:\s*;.*)?")
_FOLDER = re.compile(r"\.{1,2}(?:\[[^]]*\])?(?:\s*;.*)?")
_PLAIN = re.compile(r"(?P<name>[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)(?:\s*\[[\w\s.,-]*\])?(?:\s*===?\s*[\w.!+-]+)?")
"""Most lines of a list: a name, perhaps with a version. Those of other packages need no closer look."""


def read_listing(text: str, where: str, file: Path | None, files: Files) -> Listing:
    """Read a requirements file and the files that it includes.

    Args:
        where: the name of the list in messages.
        file: where it is; ``None``: nowhere, and then it includes nothing.

    Raises:
        StackSpecError: for a line that pip would reject, or a file that cannot be included.
    """
    listing = Listing()
    _read(text, where, file, listing, files)
    return listing


def _read(text: str, where: str, file: Path | None, listing: Listing, files: Files) -> None:
    if file is not None:
        files.begin(file)
    editable_above: tuple[str, str] | None = None
    for number, line in _logical_lines(text):
        location = f"{where}, line {number}"
        frozen = _FROZEN_EDITABLE.match(line)
        if frozen:
            editable_above = (package_of(frozen["name"]), frozen["version"])
            continue
        above, editable_above = editable_above, None  # pip writes it into the line before
        line = _COMMENT.sub("", line).strip()
        if not line:
            continue
        if (included := _INCLUDES.fullmatch(line)) is not None:
            _include(included["path"].strip().strip("'\""), location, file, listing, files)
        elif (editable := _EDITABLE.fullmatch(line)) is not None:
            listing.requirements += 1
            _editable(editable["what"], above, location, listing)
        elif line.startswith("-"):
            if not _OPTIONS.match(line):
                raise StackSpecError(f"{location}: begins with an unknown option of pip")
        else:
            listing.requirements += 1
            _line(line, location, listing)
    if file is not None:
        files.end()


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Each line with its number; lines that end with a backslash are joined, except for comments."""
    begun: list[str] = []
    first = 0
    for number, line in enumerate(text.splitlines(), 1):
        first = first if begun else number
        if line.endswith("\\") and not line.lstrip().startswith("#"):
            begun.append(line[:-1])
            continue
        yield first, " ".join([*begun, line]).strip()
        begun = []
    if begun:
        yield first, " ".join(begun).strip()


def _include(path: str, location: str, file: Path | None, listing: Listing, files: Files) -> None:
    if _URL.match(path) and "://" in path:
        raise StackSpecError(f"{location}: {displayed(path)} is not fetched; download it and include the file")
    if file is None:
        raise StackSpecError(f"{location}: a list from standard input cannot include {path}; give it as a file with -r")
    included, data = files.included(path, location)
    if data is not None:
        _read(decoded(data, f"{location}: {path}"), path, included, listing, files)


def _editable(what: str, above: tuple[str, str] | None, location: str, listing: Listing) -> None:
    if above is not None and above[0] in PACKAGES:
        listing.add(Mention.of_version(*above, location))
    elif above is None or read_source(_without_marker(what)[0]).name in PACKAGES:
        _url(what, location, listing)


def _line(line: str, location: str, listing: Listing) -> None:
    line = _REQUIREMENT_OPTIONS.sub("", line).strip()
    if _URL.match(line) or _FILE.fullmatch(line) or _FOLDER.fullmatch(line):
        _url(line, location, listing)
        return
    if (plain := _PLAIN.fullmatch(line)) is not None and package_of(plain["name"]) not in PACKAGES:
        return
    requirement = _requirement(line, location)
    name = package_of(requirement.name)
    if name not in PACKAGES:
        return
    if requirement.url:
        _url(requirement.url, location, listing, name, str(requirement.marker or ""))
    else:
        listing.add(*mention(requirement, location))


def _requirement(text: str, location: str) -> Requirement:
    """What is no requirement may be a secret, so that nothing of it is repeated but the name of a package."""
    try:
        return Requirement(text)
    except (InvalidRequirement, RecursionError) as error:
        named = next((name for name in PACKAGES if re.match(rf"{name}\b", text, re.IGNORECASE)), "")
        about = f" about {named}" if named else ""
        raise StackSpecError(f"{location}: cannot read this line{about}; {LIKE}") from error


def _url(line: str, location: str, listing: Listing, name: str = "", marker: str = "") -> None:
    """A package from a URL or a folder: the version, if any, is in the file's name or the tag."""
    url, after = _without_marker(line)
    marker = marker or after
    source, shown = read_source(url), displayed(url)
    known = name or source.name
    if known is None:
        listing.unnamed.append(f"{location}, {shown}")
        return
    if known not in PACKAGES:
        return
    if source.version is not None and source.name in (known, None):
        note = f"{location}: {known} is taken to be {source.version}, from the name {source.file}"
        listing.add(dataclasses.replace(Mention.of_version(known, source.version, location), note=note, marker=marker))
    else:
        note = (
            f"{location}: the version of {known} cannot be read from {shown}; add a pin, for example {known}==VERSION"
        )
        listing.add(Mention(known, shown, ALL, location, note=note, marker=marker))


def _without_marker(line: str) -> tuple[str, str]:
    """A URL or a path, and the marker behind it."""
    url, _, marker = line.partition(" ;")
    return url.strip(), marker.strip()
