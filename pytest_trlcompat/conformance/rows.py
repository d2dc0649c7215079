"""Which settings are tried, by name; read from each trainer's ``rows.toml``."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pytest_trlcompat._issue_ids import MEASURED

__all__ = ["OF_ARRAY", "TRAINERS", "Row", "labels", "load", "row_named"]

TRAINERS = MEASURED
"""Trainers that have a conformance suite."""
_LINE = re.compile(r"(?P<name>\w+) = \{")
OF_ARRAY = re.compile(r"(pair|ranks)_\d+")
"""Names of rows of the covering array."""
_STRATEGY = re.compile(r'\bstrategy = "(?P<name>\w+)"')


@dataclass(frozen=True)
class Row:
    """
    Attributes:
        strategy: ``single``, or one of the launches with several ranks.
        setting: fields of a config, and values of the axes that the trainer's adapter has.
    """

    name: str
    strategy: str
    setting: Mapping[str, Any]

    @property
    def label(self) -> str:
        """As verdicts name it."""
        return f"{self.strategy}-{self.name}"

    @property
    def is_of_array(self) -> bool:
        """Whether it is a row of the covering array, which combines values that have nothing to do with each other.

        Such a row is tried with the values that a release knows; any other row only in a release that knows all of it.
        """
        return OF_ARRAY.fullmatch(self.name) is not None

    @property
    def needs_liger(self) -> bool:
        """Whether only cells that have Liger try it."""
        return self.added == "liger"

    @property
    def added(self) -> str:
        """The one of :data:`~pytest_trlcompat.matrix.cells.ADDED_TAGS` that a cell must have to try it; empty where any
        cell does."""
        return next((tag for tag in ("liger", "images") if self.setting.get(tag)), "")


@lru_cache
def load(trainer: str) -> Mapping[str, Row]:
    """The rows for one of :data:`TRAINERS`, by their labels.

    The same for all releases, see :attr:`Row.is_of_array`.
    """
    rows = _rows(_text(trainer))
    return {row.label: row for row in rows}


@lru_cache
def row_named(trainer: str, label: str) -> Row | None:
    """One of :func:`load`, of which nothing else is read; ``None`` where there is none of that label."""
    line = _lines(trainer).get(label)
    return None if line is None else _rows(line)[0]


def _rows(text: str) -> list[Row]:
    return [
        Row(name, entry.get("strategy", "single"), {key: value for key, value in entry.items() if key != "strategy"})
        for name, entry in _parsed(text).items()
    ]


def _parsed(text: str) -> Mapping[str, Any]:
    if sys.version_info >= (3, 11):  # importing it takes as long as reading the rows that an answer needs
        import tomllib
    else:
        import tomli as tomllib

    return tomllib.loads(text)


def labels(trainer: str) -> tuple[str, ...]:
    """The labels of :func:`load`, without reading settings, which costs a tenth of a doctor's answer."""
    return tuple(_lines(trainer))


@lru_cache
def _lines(trainer: str) -> Mapping[str, str]:
    """Each row is a line, by its label."""
    lines = {}
    for line in _text(trainer).splitlines():
        named = _LINE.match(line)
        if named is not None:
            strategy = _STRATEGY.search(line)
            lines[f"{strategy['name'] if strategy else 'single'}-{named['name']}"] = line
    return lines


def _text(trainer: str) -> str:
    return Path(__file__).with_name(trainer).joinpath("rows.toml").read_text(encoding="utf-8")
