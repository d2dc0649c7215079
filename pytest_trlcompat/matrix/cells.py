"""Cells: the points of the version matrix, read from ``fixtures/matrix.toml`` or from ``trl=0.19.1`` arguments.

Imports only the standard library, ``packaging`` and the stack's list of packages.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.stack import PACKAGES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["DEFAULT_TAG", "Cell", "Matrix", "parse_day", "parse_pins", "read_matrix"]

DEFAULT_TAG = "default"
"""Cells with this tag are swept by a plain ``nox -s matrix``."""

_SHORT = {"trl": "trl", "transformers": "tf"}
_ORDER = ("trl", "transformers", *(package for package in PACKAGES if package not in ("trl", "transformers")))


@dataclass(frozen=True)
class Cell:
    """The few pins that a person writes down.

    Attributes:
        pins: package to version, in the order of the cell's id, without the default pins.
        date: the day as of which the cell is resolved; ``None``: found from the day its newest pin came out.
    """

    pins: Mapping[str, str]
    date: datetime.date | None = None
    tags: tuple[str, ...] = ()
    why: str = ""

    @property
    def id(self) -> str:
        """``trl0.15.2-tf4.48.3``, other pins appended by their full names (``-accelerate1.3.0``)."""
        return "-".join(f"{_SHORT.get(package, package)}{version}" for package, version in self.pins.items())


@dataclass(frozen=True)
class Matrix:
    """The cells, and what holds for all of them.

    Attributes:
        python: the interpreter of every environment, as uv understands it (``3.11``).
        pins: pins that a cell has unless it names another version (torch).
        stack: packages of the stack that a cell gets, at the version of its date, where it does not pin them.
        harness: requirements of the plugin and of building, no part of the stack.
        undated: packages that are taken as they are today: torch, and what only builds.
        settle_days: days after the newest pin came out as of which a cell without a date is resolved.
    """

    python: str
    pins: Mapping[str, str]
    stack: tuple[str, ...]
    harness: tuple[str, ...]
    undated: tuple[str, ...]
    settle_days: int
    cells: tuple[Cell, ...] = field(default=())

    def default(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if DEFAULT_TAG in cell.tags)

    def cell(self, cell_id: str) -> Cell:
        """The cell of this id.

        Raises:
            MatrixError: when there is none.
        """
        for cell in self.cells:
            if cell.id == cell_id:
                return cell
        raise MatrixError(f"no cell {cell_id!r} in the matrix; there are: {', '.join(cell.id for cell in self.cells)}")

    def all_pins(self, cell: Cell) -> dict[str, str]:
        """The cell's pins together with the default ones that it does not name."""
        return {**cell.pins, **{name: version for name, version in self.pins.items() if name not in cell.pins}}

    def requirements(self, cell: Cell) -> list[str]:
        """What is asked of the resolver."""
        pins = self.all_pins(cell)
        free = [package for package in self.stack if package not in pins]
        return [*(f"{name}=={version}" for name, version in sorted(pins.items())), *free, *self.harness]


def read_matrix(path: Path) -> Matrix:
    """Read ``matrix.toml``.

    Raises:
        MatrixError: one message that names the file, the entry and what is wrong with it.
    """
    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except FileNotFoundError as error:
        raise MatrixError(f"{path}: there is no such file; the matrix needs it to know its cells") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MatrixError(f"{path}: not valid TOML: {error}") from error
    try:
        return _matrix(document)
    except MatrixError as error:
        raise MatrixError(f"{path}: {error}") from error


def parse_pins(arguments: Iterable[str]) -> dict[str, str]:
    """``["trl=0.19.1", "transformers==4.53.3"]`` as a mapping.

    Raises:
        MatrixError: for an argument of another form, an unknown package, a malformed version, or a package named twice.
    """
    pins: dict[str, str] = {}
    for argument in arguments:
        package, sign, version = argument.partition("=")
        if not sign:
            raise MatrixError(f"{argument!r} is no pin; write PACKAGE=VERSION, for example trl=0.19.1")
        if package.strip() in pins:
            raise MatrixError(f"{package.strip()} is pinned twice; a cell has one version of each package")
        pins[package.strip()] = version.removeprefix("=").strip()
    return _pins(pins)


def parse_day(value: object) -> datetime.date:
    """A day from TOML (a date, or a string) or from the command line.

    Raises:
        MatrixError: when it is no day.
    """
    if isinstance(value, datetime.datetime):
        raise MatrixError(f"date {value.isoformat()} has a time of day; write a day, for example 2025-02-28")
    if isinstance(value, datetime.date):
        return value
    try:
        return datetime.date.fromisoformat(str(value))
    except ValueError as error:
        raise MatrixError(f"bad date {value!r}; write a day, for example 2025-02-28") from error


def _matrix(document: dict[str, Any]) -> Matrix:
    _only(document, {"defaults", "cell"}, "the top level")
    defaults = document.get("defaults", {})
    if not isinstance(defaults, dict):
        raise MatrixError("[defaults] must be a table")
    _only(defaults, {"python", "pins", "stack", "harness", "undated", "settle_days"}, "[defaults]")
    stack = _texts(defaults.get("stack", list(PACKAGES)), "[defaults] stack")
    for package in stack:
        _known(package, "[defaults] stack")
    entries = document.get("cell", [])
    if not isinstance(entries, list) or not entries:
        raise MatrixError("no [[cell]]; write at least one, for example pins = { trl = '0.15.2' }")
    return Matrix(
        python=_python(defaults.get("python", "3.11")),
        pins=_named("[defaults]", lambda: _pins(defaults.get("pins", {}), may_be_empty=True)),
        stack=stack,
        harness=_requirements(defaults.get("harness", [])),
        undated=_texts(defaults.get("undated", []), "[defaults] undated"),
        settle_days=_count(defaults.get("settle_days", 3), "[defaults] settle_days"),
        cells=_cells(entries),
    )


def _cells(entries: list[Any]) -> tuple[Cell, ...]:
    cells: dict[str, Cell] = {}
    for number, entry in enumerate(entries, 1):
        cell = _named(f"[[cell]] number {number}", lambda entry=entry: _cell(entry))
        if cell.id in cells:
            raise MatrixError(f"[[cell]] number {number}: {cell.id} is there already; remove one of the two")
        cells[cell.id] = cell
    return tuple(cells.values())


def _cell(entry: object) -> Cell:
    if not isinstance(entry, dict):
        raise MatrixError("a cell must be a table")
    _only(entry, {"pins", "date", "tags", "why"}, "a cell")
    if "pins" not in entry:
        raise MatrixError("pins are missing; write for example pins = { trl = '0.15.2', transformers = '4.48.3' }")
    return Cell(
        pins=_pins(entry["pins"]),
        date=parse_day(entry["date"]) if "date" in entry else None,
        tags=_texts(entry.get("tags", []), "tags"),
        why=_text(entry.get("why", ""), "why"),
    )


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
    return {package: raw[package] for package in _ORDER if package in raw}


def _known(package: str, where: str) -> None:
    if package not in PACKAGES:
        raise MatrixError(f"unknown package {package!r} in {where}; the stack has {', '.join(PACKAGES)}")


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


def _python(raw: object) -> str:
    text = _text(raw, "[defaults] python")
    parts = text.split(".")
    if len(parts) not in (2, 3) or not all(part.isdigit() for part in parts):
        raise MatrixError(f"malformed [defaults] python {text!r}; write for example '3.11'")
    return text


def _texts(raw: object, what: str) -> tuple[str, ...]:
    if not isinstance(raw, (list, tuple)):
        raise MatrixError(f"{what} must be a list of strings, not {raw!r}")
    return tuple(_text(item, what) for item in raw)


def _text(raw: object, what: str) -> str:
    if not isinstance(raw, str):
        raise MatrixError(f"{what} must be a string, not {raw!r}")
    return raw


def _count(raw: object, what: str) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool) or raw < 0:
        raise MatrixError(f"{what} must be a number of days, not {raw!r}")
    return raw


def _named(where: str, parse: Any) -> Any:
    """Say in which entry a mistake is."""
    try:
        return parse()
    except MatrixError as error:
        raise MatrixError(f"{where}: {error}") from error
