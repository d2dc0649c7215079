"""Verdicts that were measured and published once, and cannot be measured any more.

``untestable`` speaks for nothing and against nothing, so that a fault of the harness could turn every verdict of a cell
into it and fail nothing. Such a verdict fails its cell, unless ``fixtures/untestable.toml`` lists it with its reason.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_trlcompat import _data
from pytest_trlcompat.catalog import evidence
from pytest_trlcompat.catalog.evidence import Evidence
from pytest_trlcompat.catalog.verdict import Record, Verdict
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.stack import versions_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Allowed", "lost", "read_allowed"]


@dataclass(frozen=True)
class Allowed:
    """Verdicts that may be ``untestable`` although they were measured before.

    Attributes:
        issue: the id of a known issue.
        strategies: shell patterns.
        reason: why they cannot be measured any more.
    """

    issue: str
    strategies: tuple[str, ...]
    reason: str

    def covers(self, record: Record) -> bool:
        return record.issue == self.issue and any(
            fnmatch.fnmatchcase(record.strategy, pattern) for pattern in self.strategies
        )


def read_allowed(path: Path | None = None) -> tuple[Allowed, ...]:
    """The list; empty where there is no such file.

    Raises:
        MatrixError: an entry has not exactly ``issue``, ``strategies`` and ``reason``, each of them something.
    """
    path = path or _data.fixtures() / "untestable.toml"
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except tomllib.TOMLDecodeError as error:
        raise MatrixError(f"{path}: {error}") from error
    allowed = []
    for number, entry in enumerate(raw.get("untestable", []), 1):
        if set(entry) != {"issue", "strategies", "reason"} or not all(entry.values()):
            raise MatrixError(f"{path}: entry {number} needs issue, strategies and reason, and has {', '.join(entry)}")
        allowed.append(Allowed(entry["issue"], tuple(entry["strategies"]), entry["reason"]))
    return tuple(allowed)


def lost(
    records: Iterable[Record],
    lock: Mapping[str, str],
    published: Evidence | None = None,
    allowed: Sequence[Allowed] | None = None,
) -> list[Record]:
    """Those of a cell's verdicts that are ``untestable``, and were not when a cell with the same stack was published.

    Args:
        lock: the cell's packages and their versions.
        published: what was published; by default what ships with this package.
        allowed: those that may be so; by default those of ``fixtures/untestable.toml``.

    Raises:
        MatrixError: what was published, or the list, cannot be read.
    """
    untested = [record for record in records if record.untested]
    if not untested:
        return []  # nothing need be read
    try:
        published = evidence.published() if published is None else published
    except evidence.EvidenceError as error:
        raise MatrixError(f"nobody can say which verdicts were measured before: {error}") from error
    allowed = read_allowed() if allowed is None else allowed
    stack = versions_of(lock)
    measured = {
        key
        for cell in published.cells
        if versions_of(cell.versions) == stack
        for key, verdict in cell.verdicts.items()
        if verdict is not Verdict.UNTESTABLE
    }
    return [
        record for record in untested if record.key in measured and not any(entry.covers(record) for entry in allowed)
    ]
