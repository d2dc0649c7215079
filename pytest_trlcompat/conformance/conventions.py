"""What documentation leaves open, as a release of TRL does it; read from each trainer's ``conventions.toml``.

Imports nothing of the stack.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Conventions", "of_installed", "of_release"]


@dataclass(frozen=True)
class Conventions:
    """
    Attributes:
        undecided: of the reference's ``Undecided``, by name.
        absent: of the reference's settings, for fields that the release's config does not have.
    """

    undecided: dict[str, Any] = field(default_factory=dict)
    absent: dict[str, Any] = field(default_factory=dict)


@lru_cache
def of_release(trainer: str, trl: str, transformers: str) -> Conventions:
    """
    Args:
        trainer: one of :data:`~pytest_trlcompat.conformance.rows.TRAINERS`.
        trl, transformers: their versions.
    """
    text = Path(__file__).with_name(trainer).joinpath("conventions.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text)["convention"]
    chosen: dict[str, Any] = {}
    for entry in entries:
        ranges = {"trl": trl, "transformers": transformers}
        if all(
            SpecifierSet(entry.get(name, "")).contains(Version(each), prereleases=True) for name, each in ranges.items()
        ):
            chosen.setdefault(entry["field"], entry)
    absent = {name: entry["value"] for name, entry in chosen.items() if entry.get("absent")}
    undecided = {name: entry["value"] for name, entry in chosen.items() if not entry.get("absent")}
    return Conventions(undecided, absent)


def of_installed(trainer: str) -> Conventions:
    """Those of the releases that are installed here."""
    return of_release(trainer, metadata.version("trl"), metadata.version("transformers"))
