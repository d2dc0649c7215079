"""Which rows a sweep of the default cells tries, and which share a launch.

It tries the rows that show a known issue, the row without a setting, and the fewest others that have every value of
every setting that occurs in a row: a covering array of strength one, chosen greedily. So rows that differ from others
only in the combination of their values are left to other cells and to a full sweep. Each launch tries rows of only one
of these kinds, so that a sweep that tries one kind trains nothing of another.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pytest_trlcompat.catalog import known_issues
from pytest_trlcompat.catalog.issue import FINDINGS, measured_with
from pytest_trlcompat.conformance import rows

__all__ = ["SHOWN", "RowsOfLaunch", "covering", "launch_of"]

SHOWN = frozenset(
    (measured_with(issue.id), label)
    for issue in known_issues.load().values()
    if issue.suite == FINDINGS
    for label in issue.strategies
)
"""Rows that show a known issue, by trainer and label."""
_TOGETHER, _FEWER, _ALONE = 16, 8, ("ppo",)
"""Rows of one launch, the same for whoever asks for one: they share its start, and only they are lost with it; fewer of
those with ranks, Liger or images, which take longer. And trainers of which a sweep asks for a few rows, each of which
takes longer than a launch: they are tried one by one."""


@dataclass(frozen=True)
class RowsOfLaunch:
    """
    Attributes:
        number: from 0 on, of all trainers' launches of this kind.
        rows: in order.
    """

    number: int
    rows: Sequence[rows.Row]


@lru_cache
def covering(trainer: str) -> frozenset[str]:
    """Labels of the rows in one process by which, with :data:`SHOWN`, every value of every setting is tried.

    The row without a setting is one of them. Others may be rows of the pairwise covering array, which have many values.
    Of several that have as many values that are still to be tried, the first is taken.
    """
    alone = {label: row for label, row in rows.load(trainer).items() if row.strategy == "single" and not row.added}
    values = {label: _values(row) for label, row in alone.items()}
    others = [label for label in alone if (trainer, label) not in SHOWN]
    chosen = {label for label in others if not alone[label].setting}
    untried: set[tuple[str, str]] = set().union(*(values[label] for label in others if not alone[label].is_of_array))
    untried -= set().union(*(values[label] for label in alone if (trainer, label) in SHOWN))
    while untried:
        best = max(others, key=lambda label: len(values[label] & untried))
        chosen.add(best)
        untried -= values[best]
    return frozenset(chosen)


def launch_of(trainer: str, label: str) -> RowsOfLaunch:
    """The launch that tries a row of a trainer, together with others."""
    return _launches()[trainer, label]


@lru_cache
def _launches() -> Mapping[tuple[str, str], RowsOfLaunch]:
    """By trainer and label."""
    numbers: dict[tuple[object, ...], itertools.count[int]] = {}
    launches: dict[tuple[str, str], RowsOfLaunch] = {}
    for trainer in rows.TRAINERS:
        kinds: dict[tuple[object, ...], list[rows.Row]] = {}
        for row in rows.load(trainer).values():
            kinds.setdefault(_kind(trainer, row), []).append(row)
        for kind, alike in kinds.items():
            count = numbers.setdefault(kind, itertools.count())
            fewer = any(row.added or row.strategy != "single" for row in alike)
            size = 1 if trainer in _ALONE else _FEWER if fewer else _TOGETHER
            for start in range(0, len(alike), size):
                launch = RowsOfLaunch(next(count), alike[start : start + size])
                launches |= {(trainer, row.label): launch for row in launch.rows}
    return launches


def _kind(trainer: str, row: rows.Row) -> tuple[object, ...]:
    is_shown, is_covering = (trainer, row.label) in SHOWN, row.label in covering(trainer)
    return row.strategy, row.added, row.is_of_array, is_shown, is_covering


def _values(row: rows.Row) -> set[tuple[str, str]]:
    """Names of its settings, each with its value; where it is refused, all of them together."""
    of = {"refused": row.setting} if "refused" in row.setting else row.setting
    return {(name, json.dumps(value, sort_keys=True, default=str)) for name, value in of.items()}
