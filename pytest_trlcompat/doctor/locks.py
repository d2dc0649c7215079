"""Reading ``uv.lock``, ``pylock.toml`` (:pep:`751`), ``poetry.lock`` and ``Pipfile.lock``.

A lock may hold a package several times, for several platforms or Pythons. All of them are kept, each with its marker;
see :mod:`pytest_trlcompat.doctor.alternatives`. A package that a lock holds for an extra, a group or some environments
alone may be installed or not, and both are considered.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pytest_trlcompat.catalog.ranges import ABSENT, ALL
from pytest_trlcompat.doctor.alternatives import Asked, combine
from pytest_trlcompat.doctor.sources import displayed
from pytest_trlcompat.doctor.stack_spec import Mention, StackSpec, StackSpecError
from pytest_trlcompat.stack import PACKAGES, REQUIRED_BY_TRL, package_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["looks_like_lock", "read_lock"]

_BEGINNING = re.compile(
    r"(?:\s|#[^\n]*(?:\n|$))*(?:\{|(?:version|lock-version|created-by|requires-python)\s*=|\[\[package)"
)
_DEEP_KEY = re.compile(r"(?<![\w\"'-])(?:[\w\"'-]+[ \t]*\.[ \t]*){50}")
_POSITION = re.compile(r"\(at [^()]*\)")
_MOST = 1000
"""Entries of one package."""

Table = Mapping[str, Any]


def looks_like_lock(text: str) -> bool:
    """Whether a text without a file name is a lock rather than a list of requirements."""
    return _BEGINNING.match(text) is not None


def read_lock(text: str, where: str, asked: Asked) -> StackSpec:
    """Read a lock; its keys say which kind it is.

    Raises:
        StackSpecError: it is of no known kind, or damaged.
    """
    document = _document(text, where)
    requires = ""
    if isinstance(document.get("packages"), list) and "lock-version" in document:
        _expect(document, "lock-version", ["1."], "pylock.toml", where)
        entries, requires = _entries(document["packages"], where), _text(document.get("requires-python", ""), where)
        mentions = [_mention(entry, where, _text(entry.get("marker", ""), where)) for entry in _of_stack(entries)]
    elif isinstance(document.get("package"), list) and isinstance(document.get("version"), int):
        _expect(document, "version", ["1"], "uv.lock", where)
        entries, requires = _entries(document["package"], where), _text(document.get("requires-python", ""), where)
        mentions = list(_of_uv(entries, where))
    elif isinstance(document.get("package"), list) and "lock-version" in _table(document.get("metadata"), where):
        metadata = _table(document["metadata"], where)
        _expect(metadata, "lock-version", ["1.", "2."], "poetry.lock", where)
        entries, requires = _entries(document["package"], where), _text(metadata.get("python-versions", ""), where)
        mentions = list(_of_poetry(entries, where))
    elif "_meta" in document and isinstance(document.get("default"), Mapping):
        mentions = list(_of_pipenv(document, where))
    else:
        raise StackSpecError(
            f"{where}: neither a uv.lock nor a pylock.toml, poetry.lock or Pipfile.lock; export other locks to "
            "requirements first, for example with pip freeze"
        )
    if not any(mention.package == "trl" for mention in mentions):
        raise StackSpecError(
            f"{where}: it does not contain trl, which all known issues are about; is this the right lock?"
        )
    if len(mentions) > _MOST:
        raise StackSpecError(f"{where}: more than {_MOST} entries of {', '.join(PACKAGES)}")
    return combine(mentions, where, asked, lock=True, complete=True, requires_python=requires)


def _document(text: str, where: str) -> dict[str, Any]:
    """The keys of a lock. A message repeats nothing of an invalid one: it may be another file, with secrets."""
    is_json = text.lstrip("\ufeff \t\r\n").startswith("{")
    if not is_json and _DEEP_KEY.search(text):
        raise StackSpecError(f"{where}: a key has more than 50 parts; no lock has")
    try:
        document = json.loads(text) if is_json else tomllib.loads(text.removeprefix("\ufeff").replace("\r\n", "\n"))
    except RecursionError as error:
        raise StackSpecError(f"{where}: nested too deeply for a lock") from error
    except ValueError as error:
        position = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else _position(str(error))
        raise StackSpecError(f"{where}: not valid {'JSON' if is_json else 'TOML'}: {position}") from error
    if not isinstance(document, dict):
        raise _damaged(where)
    return document


def _position(message: str) -> str:
    position = _POSITION.search(message)
    return position[0] if position else "a value cannot be read"


def _expect(table: Table, key: str, versions: Sequence[str], kind: str, where: str) -> None:
    """Check the version of a lock's format.

    Args:
        versions: those that are understood; one that ends with a dot stands for all that begin with it.

    Raises:
        StackSpecError: the lock has another one.
    """
    version = str(table[key])[:20]
    if not any(version == known or (known.endswith(".") and version.startswith(known)) for known in versions):
        expected = " or ".join(f"{known}x" if known.endswith(".") else known for known in versions)
        raise StackSpecError(f"{where}: {key} {expected} of {kind} was expected, {version} was found")


def _entries(entries: object, where: str) -> list[Table]:
    if not isinstance(entries, list):
        raise _damaged(where)
    for entry in entries:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            raise StackSpecError(f"{where}: a package has no name; the lock is damaged, create it again")
    return entries


def _of_stack(entries: Iterable[Table]) -> Iterator[Table]:
    return (entry for entry in entries if package_of(entry["name"]) in PACKAGES)


def _mention(entry: Table, where: str, marker: str = "", sometimes: bool = False) -> Mention:
    """
    Args:
        sometimes: whether it may be left out where its marker holds.
    """
    name = package_of(entry["name"])
    if isinstance(entry.get("version"), str | int | float):
        mention = Mention.of_version(name, str(entry["version"]), where)
    else:
        source = next((entry[key] for key in ("source", "vcs", "directory", "archive") if key in entry), None)
        text = f"from {_shown(source)}"
        note = f"{where}: the version of {name} is not known ({text})"
        mention = Mention(name, text, ALL, where, note=note)
    # Those are installed wherever TRL is.
    if sometimes and name not in REQUIRED_BY_TRL:
        text = f"{mention.text} or not installed"
        mention = dataclasses.replace(mention, text=text, versions=mention.versions | ABSENT, pinned=False)
    return dataclasses.replace(mention, marker=marker)


def _shown(source: object) -> str:
    """Where a package comes from, without what may be secret."""
    if isinstance(source, Mapping):
        named = (
            source[key] for key in ("url", "git", "path", "directory", "editable") if isinstance(source.get(key), str)
        )
        return displayed(next(named, "a source"))
    return "a source"


def _any_of(markers: Sequence[str]) -> str:
    return " or ".join(f"({marker})" for marker in markers) if len(markers) > 1 else "".join(markers)


def _of_uv(entries: Sequence[Table], where: str) -> Iterator[Mention]:
    certain = _certain_in_uv(entries, where)
    for entry in _of_stack(entries):
        markers = [_text(marker, where) for marker in _list(entry.get("resolution-markers", []), where)]
        # Of a fork it is not known whether some other package asks for it there.
        sometimes = package_of(entry["name"]) not in certain
        yield _mention(entry, where, _any_of(markers), sometimes)


def _certain_in_uv(entries: Sequence[Table], where: str) -> set[str]:
    """The packages that are installed with the project, whatever the environment, the extras and the groups."""
    needed: dict[str, set[str]] = {}
    reached: set[str] = set()
    for entry in entries:
        name = package_of(entry["name"])
        source = entry.get("source")
        if isinstance(source, Mapping) and {"editable", "virtual", "directory"} & source.keys():
            reached.add(name)
        needed.setdefault(name, set()).update(
            package_of(_text(dependency.get("name"), where))
            for dependency in (_table(dependency, where) for dependency in _list(entry.get("dependencies", []), where))
            if "marker" not in dependency
        )
    left = list(reached)
    while left:
        new = needed.get(left.pop(), set()) - reached
        reached |= new
        left += new
    return reached


def _of_poetry(entries: Sequence[Table], where: str) -> Iterator[Mention]:
    """Since lock-version 2.1 an entry has its own markers; before, only the entries that depend on it have them."""
    asked_for = set()
    for entry in entries:
        for name, requirement in _table(entry.get("dependencies", {}), where).items():
            plain = isinstance(requirement, str) or (
                isinstance(requirement, Mapping) and not {"markers", "optional"} & requirement.keys()
            )
            if not plain:
                asked_for.add(package_of(name))
    for entry in _of_stack(entries):
        markers = entry.get("markers", "")
        # One marker, or one for each group: where a group is left out, its package is.
        by_group = list(markers.values()) if isinstance(markers, Mapping) else [markers]
        texts = [_text(marker, where) for marker in by_group]
        groups = _list(entry.get("groups", ["main"]), where)
        sometimes = (
            entry.get("optional") is not False
            or "main" not in groups
            or package_of(entry["name"]) in asked_for
            or len(by_group) > 1
        )
        yield _mention(entry, where, "" if "" in texts else _any_of(texts), sometimes)


def _of_pipenv(document: Table, where: str) -> Iterator[Mention]:
    default, develop = (_table(document.get(key, {}), where) for key in ("default", "develop"))
    for table, sometimes in ((default, False), (develop, True)):
        for name, entry in table.items():
            if package_of(name) not in PACKAGES:
                continue
            entry = {**_table(entry, where), "name": name}
            version = entry.get("version", "")
            if isinstance(version, str) and version.startswith("=="):
                entry["version"] = version.removeprefix("==").removeprefix("=")
            else:
                entry.pop("version", None)
                entry["source"] = {key: entry[key] for key in ("git", "path", "file") if key in entry}
            yield _mention(entry, where, _text(entry.get("markers", ""), where), sometimes and name not in default)


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise _damaged(where)
    return value


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _damaged(where)
    return value


def _table(value: object, where: str) -> Table:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _damaged(where)
    return value


def _damaged(where: str) -> StackSpecError:
    return StackSpecError(f"{where}: something in it is not what a lock has there; it is damaged, create it again")
