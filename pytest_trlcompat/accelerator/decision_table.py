"""What is done about each branch that a library takes only on NPUs, or only on CUDA GPUs: ``npu_branches.toml``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from pytest_trlcompat.accelerator.branches import Branch

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["PACKAGES", "Decision", "DecisionError", "Entry", "LocatedBranch", "decide", "load"]

PACKAGES = ("transformers", "accelerate", "trl", "deepspeed", "peft", "datasets")
TABLE = Path(__file__).with_name("npu_branches.toml")


class Decision(str, Enum):
    """What is done about a branch; the values appear in the table."""

    SUPPLIED = "supplied"
    """The stand-in for torch_npu has what is called there."""
    AS_CUDA = "as cuda"
    """An adaptation of the stand-in makes the library behave as on CUDA."""
    HARMLESS = "harmless"
    """It makes no difference to a training, or no training comes there."""
    LIMIT = "limit"
    """The software accelerator cannot show what a GPU does there."""

    def __str__(self) -> str:
        return self.value


class DecisionError(ValueError):
    """The table is invalid; the text says where."""


@dataclass(frozen=True)
class LocatedBranch:
    """A branch, and the package, release and file that have it."""

    package: str
    version: str
    file: str
    """Below the package's folder, with ``/``."""
    branch: Branch

    @property
    def location(self) -> str:
        """As in the table: ``trainer/utils.py::get_kbit_device_map``, or ``state.py::`` for a module's body."""
        return f"{self.file}::{self.branch.function}"

    def describe(self) -> str:
        branch = self.branch
        inside = branch.function or "<module>"
        return (
            f"{self.package} {self.version} {self.file}:{branch.line} in {inside}: "
            f"{branch.form} for {branch.kind} alone where {branch.condition}"
        )


@dataclass(frozen=True)
class Entry:
    """One decision, about the same branch in all the releases that have it.

    Attributes:
        versions: of the releases that have it, with those between two that were looked at; open upwards where the
            newest has it.
        at: locations, with ``*`` for any text.
        condition: what leads there, in the same manner; the opposite, ``not (...)``, counts as well.
        by: the adaptations that make the library go as on CUDA.
    """

    package: str
    versions: str
    at: tuple[str, ...]
    condition: tuple[str, ...]
    decision: Decision
    reason: str
    by: tuple[str, ...] = ()

    @cached_property
    def _specifiers(self) -> SpecifierSet:
        return SpecifierSet(self.versions)

    def holds_for(self, located: LocatedBranch) -> bool:
        return (
            located.package == self.package
            and self._specifiers.contains(located.version, prereleases=True)
            and any(_pattern(at).fullmatch(located.location) for at in self.at)
            and any(_about(condition, located.branch.condition) for condition in self.condition)
        )


def load(path: Path = TABLE) -> tuple[Entry, ...]:
    """The table.

    Raises:
        DecisionError: an entry lacks something, has something unknown, or never decides.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise DecisionError(f"the table {path} cannot be read: {error}") from error
    return tuple(_entry(number, values) for number, values in enumerate(raw.get("branch", []), start=1))


def decide(located: LocatedBranch, entries: Iterable[Entry]) -> Entry | None:
    """The first entry that holds for a branch; ``None`` if nobody has decided about it."""
    return next((entry for entry in entries if entry.holds_for(located)), None)


_KEYS = {"package", "versions", "at", "condition", "decision", "reason", "by"}


def _entry(number: int, values: Mapping[str, Any]) -> Entry:
    where = f"entry {number} ({values.get('package', '?')}, {', '.join(values.get('at', ['?']))})"
    if set(values) - {"by"} != _KEYS - {"by"}:
        odd = sorted(set(values) ^ (_KEYS - {"by"}) - {"by"})
        raise DecisionError(f"{where} needs {', '.join(sorted(_KEYS - {'by'}))}; missing or unknown: {', '.join(odd)}")
    if values["package"] not in PACKAGES:
        raise DecisionError(f"{where}: unknown package; known are {', '.join(PACKAGES)}")
    try:
        decision = Decision(values["decision"])
        SpecifierSet(values["versions"])
    except (ValueError, InvalidSpecifier) as error:
        raise DecisionError(f"{where}: {error}") from error
    if (decision is Decision.AS_CUDA) != bool(values.get("by")):
        raise DecisionError(f"{where}: 'by' names adaptations, and is only for the decision 'as cuda'")
    lists = {key: tuple(values.get(key, ())) for key in ("at", "condition", "by")}
    return Entry(values["package"], values["versions"], decision=decision, reason=values["reason"], **lists)


def _about(pattern: str, condition: str) -> bool:
    """Whether a pattern of the table matches a condition or, as often as it is negated, its opposite."""
    if _pattern(pattern).fullmatch(condition):
        return True
    opposite = re.fullmatch(r"not \((.*)\)", condition, re.DOTALL)
    return opposite is not None and _about(pattern, opposite[1])


@cache
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, text.split("*"))), re.DOTALL)
