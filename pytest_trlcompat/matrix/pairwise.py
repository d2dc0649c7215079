"""Reads and writes ``fixtures/pairwise.toml``, the cells that covering arrays have chosen."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from packaging.version import InvalidVersion, Version

from pytest_trlcompat.matrix.cells import PAIRS_TAG, PAIRWISE_TAG, Cell
from pytest_trlcompat.matrix.errors import MatrixError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["GROUPS", "pairwise_text", "read_pairwise"]

GROUPS = {
    "of_their_day": (PAIRWISE_TAG, "a release of TRL that no other cell has, beside what was newest on its day"),
    "each_release": (PAIRWISE_TAG, "a release that no other cell has"),
    "each_pair": (PAIRS_TAG, "a pair of releases that no other cell has"),
}
"""The arrays of the file: the tag of their cells, and why these are there."""

_HEAD = """\
# The cells of `nox -s matrix -- --pairwise`, one a line: the day as of which it is resolved, and its versions. Those of
# each_pair belong to `--pairwise-strength 2` alone, and have no kept locks. Chosen by `nox -s pairwise` from
# releases.toml beside the cells of matrix.toml; do not edit.
"""


def read_pairwise(path: Path) -> tuple[Cell, ...]:
    """The cells of the file; none if there is no such file.

    Raises:
        MatrixError: it is damaged.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MatrixError(f"{path}: not valid TOML: {error}; make it again with: nox -s pairwise") from error
    try:
        packages = tuple(map(str, raw["packages"]))
        return tuple(
            _cell(packages, row, tag, why) for group, (tag, why) in GROUPS.items() for row in raw.get(group, ())
        )
    except (KeyError, TypeError, ValueError) as error:
        raise MatrixError(f"{path}: no list of cells ({error!r}); make it again with: nox -s pairwise") from error


def _cell(packages: Sequence[str], row: Sequence[object], tag: str, why: str) -> Cell:
    day, *versions = row
    if not isinstance(day, datetime.date):
        raise ValueError(f"{day!r} is not a day")
    for version in versions:
        try:
            Version(str(version))
        except InvalidVersion as error:
            raise ValueError(f"{version!r} is not a version") from error
    pins = dict(zip(packages, map(str, versions), strict=True))
    return Cell(pins, day, (tag,), why)


def pairwise_text(
    packages: Sequence[str], groups: Mapping[str, Iterable[tuple[datetime.date, Sequence[str]]]], notes: Iterable[str]
) -> str:
    """The inverse of :func:`read_pairwise`.

    Args:
        groups: for each of :data:`GROUPS` days and versions.
        notes: comments, one a line.
    """
    lines = [_HEAD + "".join(f"# {note}\n" for note in notes), f"packages = [{_quoted(packages)}]"]
    for group, rows in groups.items():
        lines += ["", f"{group} = ["]
        lines += [f"    [{day.isoformat()}, {_quoted(versions)}]," for day, versions in rows]
        lines.append("]")
    return "\n".join([*lines, ""])


def _quoted(texts: Iterable[str]) -> str:
    return ", ".join(f'"{text}"' for text in texts)
