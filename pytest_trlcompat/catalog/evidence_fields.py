"""The fields of evidence, checked as they are read from a file that others may have written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pytest_trlcompat._json_files import Unreadable, check_version
from pytest_trlcompat.catalog.verdict import NAME

__all__ = ["EvidenceError", "check_names", "day", "field_of", "stack"]

_T = TypeVar("_T")
_DAY = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)


class EvidenceError(ValueError):
    """The file is no evidence."""


def field_of(raw: Any, name: str, kind: type[_T]) -> _T:
    """A field of an object, of its kind.

    Raises:
        Unreadable: it is missing, or of another kind.
    """
    value = raw.get(name) if isinstance(raw, dict) else None
    if not isinstance(value, kind):
        raise Unreadable(f"{name!r} is missing, or no {kind.__name__}: {str(value)[:100]!r}")
    return value


def day(text: str) -> str:
    """``2026-11-22``, or nothing.

    Raises:
        Unreadable: it is something else.
    """
    if text and not _DAY.fullmatch(text):
        raise Unreadable(f"'date' is no day: {text[:100]!r}")
    return text


def stack(versions: Mapping[str, Any]) -> dict[str, str]:
    """Packages and their versions.

    Raises:
        Unreadable: one has no name, or no version.
    """
    check_names(versions)
    for package, version in versions.items():
        check_version(package, version)
    return dict(versions)


def check_names(names: Iterable[str]) -> None:
    """
    Raises:
        Unreadable: one is no name of an issue, a cell, a package or a strategy.
    """
    for name in names:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise Unreadable(f"{str(name)[:100]!r} is no name")
