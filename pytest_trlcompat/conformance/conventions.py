"""How a release of TRL does what documentation leaves open; read from each trainer's ``conventions.toml``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
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

__all__ = ["Conventions", "Unrecorded", "of_installed", "of_release"]


@dataclass(frozen=True)
class Unrecorded:
    """Quantities that a release does not show.

    Attributes:
        quantities: their stages; ``logps[*`` stands for every stage that begins so.
        why: the reason, in words that fit each of them.
        unless: a field of the config with which it shows them; empty: it never does.
    """

    quantities: tuple[str, ...]
    why: str
    unless: str = ""


@dataclass(frozen=True)
class Conventions:
    """
    Attributes:
        undecided: of the reference's ``Undecided``, by name.
        absent: of the reference's settings, for fields that the release's config does not have.
        unrecorded: quantities that a recording of this release need not have.
    """

    undecided: dict[str, Any] = field(default_factory=dict)
    absent: dict[str, Any] = field(default_factory=dict)
    unrecorded: tuple[Unrecorded, ...] = ()

    def unrecorded_with(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        """By stage, why a recording of a training with these arguments need not have the quantity; for
        :func:`~pytest_trlcompat.conformance.comparison.stated`."""
        holding = [entry for entry in self.unrecorded if not entry.unless or not arguments.get(entry.unless)]
        return {stage: entry.why for entry in holding for stage in entry.quantities}


@lru_cache
def of_release(trainer: str, trl: str, transformers: str) -> Conventions:
    """
    Args:
        trainer: one of :data:`~pytest_trlcompat.conformance.rows.TRAINERS`.
        trl, transformers: their versions.
    """
    text = Path(__file__).with_name(trainer).joinpath("conventions.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    versions = {"trl": Version(trl), "transformers": Version(transformers)}

    def holds(entry: Mapping[str, Any]) -> bool:
        return all(
            SpecifierSet(entry.get(name, "")).contains(version, prereleases=True) for name, version in versions.items()
        )

    chosen: dict[str, Any] = {}
    for entry in filter(holds, tables["convention"]):
        # The first entry of the file that holds for these releases counts.
        chosen.setdefault(entry["field"], entry)
    absent = {name: entry["value"] for name, entry in chosen.items() if entry.get("absent")}
    undecided = {name: entry["value"] for name, entry in chosen.items() if not entry.get("absent")}
    unrecorded = [
        Unrecorded(tuple(entry["quantities"]), entry["why"], entry.get("unless", ""))
        for entry in filter(holds, tables.get("unrecorded", ()))
    ]
    return Conventions(undecided, absent, tuple(unrecorded))


def of_installed(trainer: str) -> Conventions:
    """The conventions of the installed releases of TRL and Transformers."""
    return of_release(trainer, metadata.version("trl"), metadata.version("transformers"))
