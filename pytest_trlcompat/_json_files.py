"""Read JSON files that others may have written or damaged: without waiting, with bounded memory, and without guessing.

Only regular files are opened: reading a pipe would wait, and a link may lead to any other file, whose first line would
then appear in a report.
"""

from __future__ import annotations

import json
import math
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from packaging.version import InvalidVersion, Version

__all__ = ["Unreadable", "check_version", "lines_of", "parse", "read_gzipped", "read_text"]

_LONGEST = 16 * 2**20
"""Bytes of a line, or of a file that is read as one text."""
_GZIP = 16 + zlib.MAX_WBITS
"""The argument of zlib that asks for the header of gzip (RFC 1952) and its checksum."""
_DEEPEST = 50
"""How deep arrays and objects may be nested."""
_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISLNK: "a symbolic link, which is not followed; put the file itself there",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}


class Unreadable(ValueError):
    """Why a file, a line or a text is not JSON that can be relied upon."""


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        Unreadable: there is none, or it is no regular file, too large, or not UTF-8.
    """
    return _decoded(_bytes(path))


def read_gzipped(path: Path) -> str:
    """The text of a gzip file; it may have as many bytes as one that is not compressed.

    Raises:
        Unreadable: as :func:`read_text`; or it is cut short, damaged, or goes on after its end.
    """
    unpacking = zlib.decompressobj(_GZIP)
    try:
        # One byte more than is allowed shows that there are too many, without unpacking them.
        data = unpacking.decompress(_bytes(path), _LONGEST + 1)
    except zlib.error as error:
        raise Unreadable(f"it is not what gzip wrote: {error}") from error
    if len(data) > _LONGEST:
        raise Unreadable(f"it unpacks to more than {_LONGEST // 2**20} MiB")
    if not unpacking.eof:
        raise Unreadable("it is cut short")
    if unpacking.unused_data:
        raise Unreadable("it goes on after its end")
    return _decoded(data)


def _bytes(path: Path) -> bytes:
    try:
        with _opened(path) as file:
            data = file.read(_LONGEST + 1)
    except OSError as error:
        raise Unreadable(error.strerror) from error
    if len(data) > _LONGEST:
        raise Unreadable(f"it has more than {_LONGEST // 2**20} MiB")
    return data


def lines_of(path: Path) -> Iterator[tuple[int, str | Unreadable, bool]]:
    """For each line: its number, its text or why it has none, and whether it is complete, with a line feed at its end.

    Raises:
        FileNotFoundError: there is no such file.
        Unreadable: it is no regular file, or cannot be read.
    """
    with _opened(path) as file:
        number = 0
        while data := file.readline(_LONGEST + 1):
            number += 1
            whole = data.endswith(b"\n")
            if len(data) <= _LONGEST or whole:
                try:
                    yield number, _decoded(data.rstrip(b"\n")), whole
                except Unreadable as error:
                    yield number, error, whole
                continue
            # The rest of a line that is too long is passed over, in pieces that bound the memory.
            while data and not data.endswith(b"\n"):
                data = file.readline(2**20)
            yield number, Unreadable(f"it has more than {_LONGEST // 2**20} MiB"), True


def _opened(path: Path) -> BinaryIO:
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unreadable(f"it is {_kind(os.lstat(path).st_mode)}" if path.is_symlink() else error.strerror) from error
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise Unreadable(f"it is {_kind(mode)}")


def _kind(mode: int) -> str:
    return next((name for is_kind, name in _KINDS.items() if is_kind(mode)), "no regular file")


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"it is not UTF-8: byte {data[error.start]:#04x} at {error.start}") from error


def parse(text: str) -> Any:
    """The value of a JSON text (RFC 8259), in which no object has a name twice.

    Raises:
        Unreadable: it is none, or holds NaN, an infinite number, a name twice, or is nested more than 50 deep.
    """
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_finite, parse_int=_integer
        )
    except Unreadable:
        raise
    except json.JSONDecodeError as error:
        raise Unreadable(f"it is not JSON: {error}") from error
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"it is not JSON that can be read: {error}") from error
    # The number of brackets bounds the depth, and is quickly counted.
    if text.count("[") + text.count("{") > _DEEPEST:
        _check_depth(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    # Python would take the last of them without a word.
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise Unreadable(f"the name {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return members


def _constant(name: str) -> float:
    raise Unreadable(f"JSON has no {name}")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise Unreadable(f"the number {text[:20]} is too large")
    return number


def _integer(text: str) -> int:
    if len(text) > 300:  # no float holds it either
        raise Unreadable(f"the number {text[:20]}... is too large")
    return int(text)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            inner
            for container in level
            for inner in (
                container.values() if isinstance(container, dict) else container if isinstance(container, list) else ()
            )
        ]
        if not level:
            return
    raise Unreadable(f"it is nested more than {_DEEPEST} deep")


def check_version(package: str, version: Any) -> None:
    """
    Raises:
        Unreadable: it is no version (:pep:`440`).
    """
    try:
        if not isinstance(version, str) or version != version.strip():
            raise InvalidVersion
        Version(version)
    except InvalidVersion as error:
        raise Unreadable(f"has an invalid version of {package}: {str(version)[:100]!r}") from error
