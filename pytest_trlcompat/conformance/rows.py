"""Which settings are tried, by name; read from each trainer's ``rows.toml``.

Imports nothing of the stack.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pytest_trlcompat._issue_ids import MEASURED

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["OF_ARRAY", "TRAINERS", "Row", "labels", "load"]

TRAINERS = MEASURED
"""Trainers that have a conformance suite."""
_LINE = re.compile(r"(?P<name>\w+) = \{")
OF_ARRAY = re.compile(r"(pair|ranks)_\d+")
"""How names of rows of the covering array begin."""
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
        """Whether it holds values together that have nothing to do with each other: it is tried with those of them
        that a release knows, and any other row only in a release that knows all of it."""
        return OF_ARRAY.fullmatch(self.name) is not None

    @property
    def needs_liger(self) -> bool:
        """Whether cells that have Liger try it, and no others."""
        return self.added == "liger"

    @property
    def added(self) -> str:
        """Which of :data:`~pytest_trlcompat.matrix.cells.ADDED_TAGS` the cells have that try it, and no others; empty
        where any cell does."""
        return next((tag for tag in ("liger", "images") if self.setting.get(tag)), "")


@lru_cache
def load(trainer: str) -> Mapping[str, Row]:
    """The rows for one of :data:`TRAINERS`, by their labels.

    The same for all releases, see :attr:`Row.is_of_array`.
    """
    raw = tomllib.loads(_text(trainer))
    found = [
        Row(name, entry.get("strategy", "single"), {key: value for key, value in entry.items() if key != "strategy"})
        for name, entry in raw.items()
    ]
    return {row.label: row for row in found}


@lru_cache
def labels(trainer: str) -> tuple[str, ...]:
    """The labels of :func:`load`, without reading settings, which costs a tenth of a doctor's answer."""
    found = []
    for line in _text(trainer).splitlines():
        named = _LINE.match(line)
        if named is not None:
            strategy = _STRATEGY.search(line)
            found.append(f"{strategy['name'] if strategy else 'single'}-{named['name']}")
    return tuple(found)


def _text(trainer: str) -> str:
    return Path(__file__).with_name(trainer).joinpath("rows.toml").read_text(encoding="utf-8")
