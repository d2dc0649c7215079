"""Which package, and which version, a URL, a folder or a file is, as far as its name says. Nothing is fetched."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    NormalizedName,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

from pytest_trlcompat.stack import PACKAGES

__all__ = ["Source", "displayed", "read_source"]

_TAG = re.compile(r"v?(\d+(?:\.\d+)+)$")
_ARCHIVE = re.compile(
    r"/(?P<name>[^/]+)/(?:-/)?archive/(?:refs/(?:tags|heads)/)?(?P<reference>[^/]+?)(?:\.tar\.gz|\.zip)$"
)
"""What GitHub and GitLab offer of a repository at a tag."""
_ARCHIVES = (".whl", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")


@dataclass(frozen=True)
class Source:
    """What a name says.

    Attributes:
        name: of the package, canonical; ``None`` if nobody knows without building it.
        version: ``None`` if that is not known.
        file: the last part of the path, from which it was read.
    """

    name: str | None
    version: str | None
    file: str


def read_source(url: str) -> Source:
    """Read a URL or a path, with what pip accepts behind it.

    A name is believed if it must be right, as in the file name of a wheel, or if it is that of a package of the stack;
    a folder or repository of another name may hold anything.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # an IPv6 address that is none
        return Source(None, None, "")
    fragment = dict(part.partition("=")[::2] for part in parts.fragment.split("&"))
    path = unquote(parts.path.rstrip("/"))
    last = path.rpartition("/")[2]
    egg = canonicalize_name(fragment.get("egg", "").partition("[")[0])
    if (of_file := _of_file(last)) is not None:
        return Source(of_file[0], of_file[1], last)
    if (archive := _ARCHIVE.search(path)) is not None:
        repository, reference = archive["name"], archive["reference"]
    else:
        repository, _, reference = last.partition("@")
    tag = _TAG.match(reference)
    name = egg or canonicalize_name(repository.removesuffix(".git"))
    known = bool(egg) or (name in PACKAGES and (archive is not None or not last.endswith(_ARCHIVES)))
    return Source(name if known else None, tag[1] if tag else None, last)


def _of_file(name: str) -> tuple[NormalizedName, str] | None:
    try:
        if name.endswith(".whl"):
            wheel = parse_wheel_filename(name)
            return wheel[0], str(wheel[1])
        sdist = parse_sdist_filename(name)
    except (InvalidWheelFilename, InvalidSdistFilename, ValueError):
        return None
    return sdist[0], str(sdist[1])


def displayed(url: str) -> str:
    """A URL without what may be secret: a password, a token in place of a user, what follows the path."""
    shown = re.split(r"[?#]", url, maxsplit=1)[0]
    scheme, separator, rest = shown.partition("://")
    if not separator:
        return shown
    authority, slash, path = rest.partition("/")
    user, at, host = authority.rpartition("@")
    return f"{scheme}://{'***' if at and user != 'git' else user}{at}{host}{slash}{path}"
