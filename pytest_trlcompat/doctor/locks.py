"""Reading ``uv.lock`` and ``pylock.toml`` (:pep:`751`). Imports no package of the stack.

A lock may hold a package several times, for several platforms or Pythons. Markers decide which one applies to
this interpreter; where they leave several, all of these are possible.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from packaging.markers import InvalidMarker, Marker, UndefinedComparison, UndefinedEnvironmentName
from packaging.utils import canonicalize_name

from pytest_trlcompat.catalog.ranges import ALL
from pytest_trlcompat.doctor.stack_spec import Mention, StackSpec, StackSpecError, of_mentions, pin
from pytest_trlcompat.stack import PACKAGES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["read_lock"]


def read_lock(text: str, where: str) -> StackSpec:
    """Read a lock; its keys say which of the two kinds it is.

    Raises:
        StackSpecError: it is neither.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise StackSpecError(f"{where}: not valid TOML: {error}") from error
    if isinstance(document.get("packages"), list) and "lock-version" in document:
        if not str(document["lock-version"]).startswith("1."):
            raise StackSpecError(
                f"{where}: lock-version 1.x of pylock.toml was expected, {document['lock-version']} found"
            )
        return _to_spec(document["packages"], _pylock_markers, where)
    if isinstance(document.get("package"), list) and isinstance(document.get("version"), int):
        if document["version"] != 1:
            raise StackSpecError(f"{where}: version 1 of uv.lock was expected, {document['version']} was found")
        return _to_spec(document["package"], _uv_markers, where)
    raise StackSpecError(
        f"{where}: neither a uv.lock nor a pylock.toml; export other locks to requirements first, "
        "for example with uv export, poetry export or pip freeze"
    )


def _uv_markers(entry: Mapping[str, Any]) -> list[str]:
    """Markers of which one must hold."""
    return list(entry.get("resolution-markers", []))


def _pylock_markers(entry: Mapping[str, Any]) -> list[str]:
    return [entry["marker"]] if "marker" in entry else []


def _to_spec(entries: list[Any], markers: Any, where: str) -> StackSpec:
    found: dict[str, list[Mention]] = {}
    for entry in entries:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            raise StackSpecError(f"{where}: a package has no name; the lock is damaged, create it again")
        name = canonicalize_name(entry["name"])
        if name in PACKAGES and _possible(markers(entry)):
            found.setdefault(name, []).append(_mention(name, entry, where))
    mentions = [_one_of(package, several, where) for package, several in found.items()]
    if "trl" not in found:
        raise StackSpecError(
            f"{where}: it does not contain trl, which all known issues are about; is this the right lock?"
        )
    return of_mentions(mentions, where, complete=True)


def _mention(name: str, entry: Mapping[str, Any], where: str) -> Mention:
    if "version" in entry:
        return pin(name, str(entry["version"]), where)
    source = entry.get("source", entry.get("vcs", entry.get("directory", entry.get("archive", "a source"))))
    return Mention(name, f"from {source}", ALL, where)


def _one_of(name: str, several: list[Mention], where: str) -> Mention:
    versions = list(dict.fromkeys(mention.text for mention in several))
    if len(versions) == 1:
        note = "" if several[0].pinned else f"{where}: the version of {name} is not known ({several[0].text})"
        return dataclasses.replace(several[0], note=note)
    possible = several[0].versions
    for mention in several[1:]:
        possible |= mention.versions
    text = " or ".join(versions)
    note = f"{where}: holds {name} {text} for different environments, and its markers do not say which applies here"
    return Mention(name, text, possible, where, note=note)


def _possible(markers: Iterable[str]) -> bool:
    """Whether one of the markers may hold for this interpreter; a marker about groups or extras may."""
    markers = list(markers)
    return not markers or any(_holds(marker) for marker in markers)


def _holds(marker: str) -> bool:
    if any(word in marker for word in ("extra", "dependency_groups")):
        return True
    try:
        return Marker(marker).evaluate()
    except (InvalidMarker, UndefinedComparison, UndefinedEnvironmentName, KeyError):
        return True
