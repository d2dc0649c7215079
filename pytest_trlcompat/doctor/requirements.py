"""Reading requirements files, the output of ``pip freeze`` and pins on a command line.

What pip accepts is accepted: comments, continued lines, hashes, markers, ``-r`` and ``-c``, editables, URLs, byte order
marks. Only the packages of the stack are looked at. Imports only the standard library and ``packaging``.
"""

from __future__ import annotations

import codecs
import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

from pytest_trlcompat.catalog.ranges import ALL, parse
from pytest_trlcompat.doctor.stack_spec import Mention, StackSpecError, pin
from pytest_trlcompat.stack import PACKAGES

__all__ = ["Listing", "decoded", "of_pins", "read_listing"]

_INCLUDES = re.compile(r"(?:(?:-r|-c)\s*|(?:--requirement|--constraint)(?:\s+|=))(?P<path>\S.*)")
_EDITABLE = re.compile(r"(?:-e\s*|--editable(?:\s+|=))(?P<what>\S.*)")
_OPTIONS = re.compile(
    r"(?:-i|-f|--index-url|--extra-index-url|--no-index|--find-links|--no-binary|--only-binary|--prefer-binary|--pre"
    r"|--require-hashes|--trusted-host|--use-feature)\b"
)
_REQUIREMENT_OPTIONS = re.compile(r"\s--(?:hash|config-settings?|global-option|no-deps)\b.*$")
_COMMENT = re.compile(r"(?:^|\s)#.*$")
_FROZEN_EDITABLE = re.compile(r"# Editable .*\((?P<name>[\w.-]+)==(?P<version>[^\s)]+)\)")
"""What pip freeze writes above ``-e /some/folder``, which itself says neither name nor version."""
_URL = re.compile(r"(?:[a-z][a-z+]*:|\.{0,2}/)", re.IGNORECASE)
_FILE = re.compile(r"^[^\s=<>;@]+\.(?:whl|tar\.gz|zip)$")
_TAG = re.compile(r"v?(\d+(?:\.\d+)+)$")
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass
class Listing:
    """What a list of requirements says.

    Attributes:
        ignored: lines that name a package of the stack but do not apply to this Python.
        requirements: how many lines named a package, of the stack or not.
    """

    mentions: list[Mention] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    requirements: int = 0


def decoded(data: bytes, where: str) -> str:
    """Text in the encoding that its byte order mark names, else in UTF-8.

    Raises:
        StackSpecError: it is not text in that encoding.
    """
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise StackSpecError(f"{where}: not text in UTF-8 ({error}); save it as UTF-8") from error
    if "\0" in text:
        raise StackSpecError(f"{where}: not text (it holds null bytes); give the output of pip freeze, or a lock")
    return text


def read_listing(text: str, where: str, folder: Path | None) -> Listing:
    """Read a requirements file and the files that it includes.

    Args:
        where: the name of the list in messages.
        folder: where included files are looked for; ``None``: nowhere, since the list is not a file.

    Raises:
        StackSpecError: for a line that pip would reject, or a missing included file.
    """
    listing = Listing()
    _read(text, where, folder, listing, ())
    return listing


def of_pins(words: Sequence[str]) -> list[Mention]:
    """Read ``trl==0.15.2`` words of a command line; ranges are understood as well.

    Raises:
        StackSpecError: for a word of another form, or a package that is not part of the stack.
    """
    mentions = []
    for word in words:
        requirement = _requirement(re.sub(r"^([\w.-]+(?:\[[^]]*\])?)\s*=(?!=)", r"\1==", word), repr(word))
        name = canonicalize_name(requirement.name)
        if name not in PACKAGES:
            near = difflib.get_close_matches(name, PACKAGES, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise StackSpecError(f"unknown package {requirement.name!r}; known are {', '.join(PACKAGES)}{hint}")
        mention = _mention(requirement, "the command line")
        if mention is not None:
            mentions.append(mention)
    return mentions


def _read(text: str, where: str, folder: Path | None, listing: Listing, including: tuple[Path, ...]) -> None:
    editable_above: tuple[str, str] | None = None
    for number, line in _logical_lines(text):
        location = f"{where}, line {number}"
        frozen = _FROZEN_EDITABLE.match(line)
        if frozen:
            editable_above = (canonicalize_name(frozen["name"]), frozen["version"])
            continue
        line = _COMMENT.sub("", line).strip()
        if not line:
            continue
        if (included := _INCLUDES.fullmatch(line)) is not None:
            _include(included["path"], location, folder, listing, including)
        elif (editable := _EDITABLE.fullmatch(line)) is not None:
            listing.requirements += 1
            _editable(editable["what"], editable_above, location, listing)
        elif line.startswith("-"):
            if not _OPTIONS.match(line):
                raise StackSpecError(f"{location}: unknown option {line.split()[0]!r}")
        else:
            listing.requirements += 1
            _line(line, location, listing)
        editable_above = None


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Each line with its number; lines that end with a backslash are joined, except for comments."""
    begun, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        first = first if begun else number
        if line.endswith("\\") and not line.lstrip().startswith("#"):
            begun += line[:-1] + " "
            continue
        yield first, (begun + line).strip()
        begun = ""
    if begun:
        yield first, begun.strip()


def _include(path: str, location: str, folder: Path | None, listing: Listing, including: tuple[Path, ...]) -> None:
    path = path.strip().strip("'\"")
    if _URL.match(path) and "://" in path:
        raise StackSpecError(f"{location}: {path} is not fetched; download it and include the file")
    if folder is None:
        raise StackSpecError(f"{location}: a list from standard input cannot include {path}; give it as a file with -r")
    file = (folder / path).resolve()
    if file in including:
        raise StackSpecError(f"{location}: {path} includes itself, through {len(including)} files")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise StackSpecError(f"{location}: cannot read {file}: {error.strerror}") from error
    _read(decoded(data, str(file)), path, file.parent, listing, (*including, file))


def _editable(what: str, above: tuple[str, str] | None, location: str, listing: Listing) -> None:
    if above is not None and above[0] in PACKAGES:
        listing.mentions.append(pin(*above, location))
        return
    _url(what, location, listing)


def _line(line: str, location: str, listing: Listing) -> None:
    line = _REQUIREMENT_OPTIONS.sub("", line).strip()
    if _URL.match(line) or _FILE.search(line):
        _url(line, location, listing)
        return
    requirement = _requirement(line, location)
    name = canonicalize_name(requirement.name)
    if name not in PACKAGES:
        return
    if requirement.url:
        if _wanted(requirement):
            _url(requirement.url, location, listing, name)
        return
    mention = _mention(requirement, location)
    if mention is None:
        listing.ignored.append(f"{location}: {line} is ignored, because its marker excludes this Python")
    else:
        listing.mentions.append(mention)


def _requirement(text: str, location: str) -> Requirement:
    try:
        return Requirement(text)
    except InvalidRequirement as error:
        reason = str(error).split("\n")[0]
        raise StackSpecError(
            f"{location}: cannot read {text!r} ({reason}); write one requirement a line, like trl==0.15.2 "
            "(as pip freeze and pip list --format=freeze do)"
        ) from error


def _wanted(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _mention(requirement: Requirement, location: str) -> Mention | None:
    """What a requirement by name specifies; ``None`` if its marker excludes this Python."""
    if not _wanted(requirement):
        return None
    name = canonicalize_name(requirement.name)
    specifiers = list(requirement.specifier)
    if len(specifiers) == 1 and specifiers[0].operator in ("==", "===") and not specifiers[0].version.endswith("*"):
        return pin(name, specifiers[0].version, location)
    text = str(requirement.specifier)
    try:
        versions = parse(text)
    except ValueError as error:
        raise StackSpecError(f"{location}: {error}") from error
    if not versions:
        raise StackSpecError(f"{location}: no version of {name} satisfies {text!r}")
    return Mention(name, versions.describe(), versions, location)


def _url(url: str, location: str, listing: Listing, name: str | None = None) -> None:
    """A package from a URL or a folder: the version, if any, is in the file's name or the tag."""
    parts = urlsplit(url.split(" ;")[0].strip())
    fragment = dict(part.partition("=")[::2] for part in parts.fragment.split("&"))
    last = unquote(parts.path.rstrip("/").rpartition("/")[2])
    found, version = _of_file(last)
    if version is None:
        repository, _, reference = last.partition("@")
        found = fragment.get("egg", "").partition("[")[0] or repository.removesuffix(".git")
        tag = _TAG.match(reference)
        version = tag[1] if tag else None
    name = name or canonicalize_name(found)
    if name not in PACKAGES:
        return
    if version is not None:
        note = f"{location}: {name} is taken to be {version}, from the name {last}"
        listing.mentions.append(dataclasses.replace(pin(name, version, location), note=note))
    else:
        note = f"{location}: the version of {name} cannot be read from {url}; add a pin, for example {name}==VERSION"
        listing.mentions.append(Mention(name, url, ALL, location, note=note))


def _of_file(name: str) -> tuple[str, str | None]:
    try:
        if name.endswith(".whl"):
            wheel = parse_wheel_filename(name)
            return wheel[0], str(wheel[1])
        sdist = parse_sdist_filename(name)
    except (InvalidWheelFilename, InvalidSdistFilename):
        return "", None
    return sdist[0], str(sdist[1])
