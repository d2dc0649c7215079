"""The sweeps that were published before, a small file for each day: ``evidence/2026-11-22.json.gz``.

The newest is not among them: it is ``fixtures/evidence.json``, which ships with the package, and comes here when
another takes its place. The same facts in fewer bytes: a letter for each verdict, in columns that all cells share, so
that a year of weeks is read in a moment.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_trlcompat._json_files import Unreadable, parse, read_gzipped
from pytest_trlcompat.catalog.evidence import Evidence, Key, MeasuredCell, Origin, origins_of
from pytest_trlcompat.catalog.evidence_fields import check_names, day, field_of, stack
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.matrix.files import write_whole

__all__ = ["Past", "keep", "pack", "read", "unpack"]

_SCHEMA = 1
_ENDING = ".json.gz"
_NONE = "."
"""Stands where a cell has no verdict in a column."""
_LETTERS = {
    Verdict.OK: "o",
    Verdict.BROKEN: "b",
    Verdict.SILENT: "s",
    Verdict.WASTEFUL: "w",
    Verdict.BLOCKED: "k",
    Verdict.ERROR: "e",
    Verdict.HANG: "h",
    Verdict.ABSENT: "a",
    Verdict.UNTESTABLE: "u",
}
"""As they are written; each file says itself what its letters mean."""


@dataclass(frozen=True)
class Past:
    """What was published before.

    Attributes:
        sweeps: oldest first.
        problems: a line for each file that could not be read, and was left out.
    """

    sweeps: tuple[Evidence, ...] = ()
    problems: tuple[str, ...] = ()


def keep(evidence: Evidence, folder: Path) -> Path:
    """Write a sweep into the folder of those that were published before, and return its path."""
    path = folder / f"{evidence.date}{_ENDING}"
    write_whole(path, pack(evidence))
    return path


def read(folder: Path, before: str = "") -> Past:
    """The sweeps of a folder; none where there is no such folder. What cannot be read costs the others nothing.

    Args:
        before: a day; leave out what was published on it or later.
    """
    sweeps, problems = [], []
    for path in sorted(folder.glob(f"*{_ENDING}")):
        try:
            sweep = unpack(read_gzipped(path))
            if f"{sweep.date}{_ENDING}" != path.name:
                raise Unreadable(f"it is of {sweep.date or 'no day'}")
        except Unreadable as error:
            problems.append(f"{path}: {error}; this sweep is left out of what is said of earlier ones")
            continue
        if not before or sweep.date < before:
            sweeps.append(sweep)
    return Past(tuple(sweeps), tuple(problems))


def pack(evidence: Evidence) -> bytes:
    """A sweep as its file has it; the same bytes whenever they are made."""
    columns = sorted({key for cell in evidence.cells for key in cell.verdicts})
    document = {
        "schema": _SCHEMA,
        "date": evidence.date,
        "letters": {letter: verdict.value for verdict, letter in _LETTERS.items()},
        "columns": columns,
        "cells": [_packed(cell, columns) for cell in evidence.cells],
    }
    # gzip, since every Python has it: xz would save a quarter, zstd is a package.
    # Without mtime the time of writing would be part of the bytes.
    return gzip.compress(json.dumps(document, separators=(",", ":")).encode(), mtime=0)


def _packed(cell: MeasuredCell, columns: Sequence[Key]) -> dict[str, Any]:
    verdicts = (cell.verdicts.get(column) for column in columns)
    by = {str(number): cell.blocked_by[key] for number, key in enumerate(columns) if key in cell.blocked_by}
    fitting = [number for number, key in enumerate(columns) if key in cell.fitting]
    origins = list(dict.fromkeys([*([cell.origin] if cell.origin else []), *cell.other_origins.values()]))
    others = {
        str(number): origins.index(cell.other_origins[key])
        for number, key in enumerate(columns)
        if key in cell.other_origins
    }
    return {
        "id": cell.id,
        "date": cell.date,
        "stack": dict(cell.versions),
        "verdicts": "".join(_NONE if verdict is None else _LETTERS[verdict] for verdict in verdicts),
        **({"blocked_by": by} if by else {}),
        **({"fitting": fitting} if fitting else {}),
        **({"measured": [list(origin) for origin in origins]} if origins else {}),
        **({"origins": others} if others else {}),
        **({} if cell.attributed else {"attributed": False}),
    }


def unpack(text: str) -> Evidence:
    """The inverse of :func:`pack`, from the text that its bytes unpack to.

    Raises:
        Unreadable: for anything else.
    """
    raw = parse(text)
    schema = raw.get("schema") if isinstance(raw, dict) else None
    # In Python True equals 1, and a damaged file may say true.
    if schema != _SCHEMA or isinstance(schema, bool):
        raise Unreadable(f"schema {_SCHEMA} was expected, {str(schema)[:100]} was found")
    letters = _letters(field_of(raw, "letters", dict))
    columns = [_column(column) for column in field_of(raw, "columns", list)]
    check_names({name for column in columns for name in column})
    if len(set(columns)) < len(columns):
        raise Unreadable("a column stands twice")
    cells = tuple(_cell(cell, columns, letters) for cell in field_of(raw, "cells", list))
    if len({cell.id for cell in cells}) < len(cells):
        raise Unreadable("a cell stands twice")
    return Evidence(day(field_of(raw, "date", str)), cells)


def _letters(raw: Mapping[str, Any]) -> dict[str, Verdict]:
    known = {verdict.value: verdict for verdict in Verdict}
    for letter, name in raw.items():
        if len(letter) != 1 or letter == _NONE or not isinstance(name, str) or name not in known:
            raise Unreadable(f"the letter {letter[:100]!r} stands for no verdict: {str(name)[:100]!r}")
    return {letter: known[name] for letter, name in raw.items()}


def _column(raw: Any) -> Key:
    if not isinstance(raw, list) or len(raw) != 3 or not all(isinstance(part, str) for part in raw):
        raise Unreadable(f"a column is no issue, subject and strategy: {str(raw)[:100]}")
    return raw[0], raw[1], raw[2]


def _cell(raw: Any, columns: Sequence[Key], letters: Mapping[str, Verdict]) -> MeasuredCell:
    cell_id = field_of(raw, "id", str)
    try:
        text = field_of(raw, "verdicts", str)
        if len(text) != len(columns):
            raise Unreadable(f"it has {len(text)} verdicts for {len(columns)} columns")
        if unknown := set(text) - {*letters, _NONE}:
            raise Unreadable(f"{min(unknown)!r} is the letter of no verdict")
        verdicts = {key: letters[letter] for key, letter in zip(columns, text, strict=True) if letter != _NONE}
        date = None if raw.get("date") is None else day(field_of(raw, "date", str))
        blocked_by = _blockers(raw.get("blocked_by", {}), columns)
        check_names({cell_id, *blocked_by.values()})
        attributed = bool(raw.get("attributed", True))
        fitting = _fitting(raw.get("fitting", []), columns)
        versions = stack(field_of(raw, "stack", dict))
        origins = origins_of(raw.get("measured", []))
        others = _other_origins(raw.get("origins", {}), columns, origins)
        origin = next(iter(origins), None)
        return MeasuredCell(cell_id, versions, verdicts, date, attributed, blocked_by, fitting, origin, others)
    except Unreadable as error:
        raise Unreadable(f"the cell {cell_id[:100]!r}: {error}") from error


def _blockers(raw: Any, columns: Sequence[Key]) -> dict[Key, str]:
    if not isinstance(raw, dict):
        raise Unreadable(f"'blocked_by' is no object: {str(raw)[:100]}")
    for number in raw:
        # int() also takes digits of other scripts, signs, spaces and underscores.
        if not re.fullmatch(r"\d{1,6}", number, re.ASCII) or int(number) >= len(columns):
            raise Unreadable(f"'blocked_by' names no column: {number[:100]!r}")
    return {columns[int(number)]: name for number, name in raw.items()}


def _other_origins(raw: Any, columns: Sequence[Key], origins: Sequence[Origin]) -> dict[Key, Origin]:
    if not isinstance(raw, dict):
        raise Unreadable(f"'origins' is no object: {str(raw)[:100]}")
    for number, origin in raw.items():
        known = re.fullmatch(r"\d{1,6}", number, re.ASCII) and int(number) < len(columns)
        if not known or type(origin) is not int or not 0 <= origin < len(origins):
            raise Unreadable(f"'origins' names no column or no origin: {number[:100]!r}, {str(origin)[:100]!r}")
    return {columns[int(number)]: origins[origin] for number, origin in raw.items()}


def _fitting(raw: Any, columns: Sequence[Key]) -> frozenset[Key]:
    numbers = raw if isinstance(raw, list) else [raw]
    for number in numbers:
        # isinstance would let a bool pass.
        if type(number) is not int or not 0 <= number < len(columns):
            raise Unreadable(f"'fitting' names no column: {str(number)[:100]!r}")
    return frozenset(columns[number] for number in numbers)
