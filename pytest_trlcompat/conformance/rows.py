"""Which settings are tried, by name; read from ``rows.toml``.

Imports nothing of the stack.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Row", "load"]


@dataclass(frozen=True)
class Row:
    """
    Attributes:
        strategy: ``single``, or one of the launches with several ranks.
        setting: fields of a config, and values of :data:`~pytest_trlcompat.conformance.configs.AXES`.
    """

    name: str
    strategy: str
    setting: Mapping[str, Any]

    @property
    def label(self) -> str:
        """As verdicts name it."""
        return f"{self.strategy}-{self.name}"


@lru_cache
def load(trainer: str) -> Mapping[str, Row]:
    """The rows for a trainer, ``grpo`` or ``ppo``, by their labels.

    The same for all releases: what a release does not know of a setting is left out where it is tried.
    """
    raw = tomllib.loads(Path(__file__).with_name("rows.toml").read_text(encoding="utf-8"))[trainer]
    found = [
        Row(name, entry.get("strategy", "single"), {key: value for key, value in entry.items() if key != "strategy"})
        for name, entry in raw.items()
    ]
    return {row.label: row for row in found}
