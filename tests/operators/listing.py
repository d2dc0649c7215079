"""The operators of which the software accelerator does not give what the CPU gives, and why: exceptions.toml.

Judges outcomes by that list, in both directions: what differs has to be listed, and what is listed has to differ, so
that the list can only shrink. Must not import torch.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["DTYPES", "LIST", "Exemption", "Outcome", "judge", "read_exemptions", "table", "without_operator"]

DTYPES = ("float32", "bfloat16", "float16", "int64", "bool", "complex64")
LIST = Path(__file__).with_name("exceptions.toml")
_KEYS = {"operators", "dtypes", "torch", "shows", "reason"}


@dataclass(frozen=True)
class Outcome:
    """What came of one operator in one dtype."""

    operator: str
    dtype: str
    difference: str | None = None
    """The first difference from the CPU; None where there is none."""
    failure: str | None = None
    """How its process ended, where it did not end well: ``killed by signal 11``."""


@dataclass(frozen=True)
class Exemption:
    """An entry of the list."""

    operators: tuple[str, ...]
    dtypes: tuple[str, ...]
    torch: SpecifierSet
    shows: str
    """What the difference has to contain, so that another one is not taken for it."""
    reason: str

    def names(self, operator: str, dtype: str, torch: Version) -> bool:
        return operator in self.operators and dtype in self.dtypes and self.torch.contains(torch, prereleases=True)


def read_exemptions(path: Path = LIST) -> list[Exemption]:
    """The list.

    Raises:
        ValueError: for an entry with a key or a dtype that there is not, or without one that it needs.
    """
    with open(path, "rb") as file:
        return [_read(entry) for entry in tomllib.load(file)["exception"]]


def _read(entry: Mapping[str, Any]) -> Exemption:
    unknown = set(entry) - _KEYS
    missing = {"operators", "shows", "reason"} - set(entry)
    dtypes = tuple(entry.get("dtypes", DTYPES))
    if unknown or missing or not set(dtypes) <= set(DTYPES):
        raise ValueError(
            f"{LIST.name}: unknown {sorted(unknown)}, missing {sorted(missing)} or wrong dtypes in {entry}"
        )
    torch = SpecifierSet(entry.get("torch", ""))
    return Exemption(tuple(entry["operators"]), dtypes, torch, entry["shows"], entry["reason"])


def judge(outcomes: Iterable[Outcome], exemptions: Sequence[Exemption], torch: str) -> list[str]:
    """What is wrong with the device or with the list, a line for each operator and dtype."""
    return [problem for outcome in outcomes for problem in _judge_one(outcome, exemptions, _release(torch))]


def without_operator(outcomes: Iterable[Outcome], exemptions: Sequence[Exemption], torch: str) -> list[str]:
    """The operators of which the list says something for this torch, and which were not tried in any such dtype."""
    tried = {(outcome.operator, outcome.dtype) for outcome in outcomes}
    return [
        operator
        for exemption in exemptions
        if exemption.torch.contains(_release(torch), prereleases=True)
        for operator in exemption.operators
        if not any((operator, dtype) in tried for dtype in exemption.dtypes)
    ]


def _release(torch: str) -> Version:
    return Version(Version(torch).base_version)


def _judge_one(outcome: Outcome, exemptions: Sequence[Exemption], torch: Version) -> Iterator[str]:
    name = f"{outcome.operator} in {outcome.dtype}"
    if outcome.failure is not None:
        yield f"{name}: {outcome.failure}"  # never to be listed
        return
    listed = [entry for entry in exemptions if entry.names(outcome.operator, outcome.dtype, torch)]
    if len(listed) > 1:
        yield f"{name}: is listed {len(listed)} times"
    if outcome.difference is None:
        if listed:
            yield f"{name}: is listed ({listed[0].reason}), and equals the CPU's; take it off the list"
    elif not listed:
        yield f"{name}: {outcome.difference}"
    elif listed[0].shows not in outcome.difference:
        yield f"{name}: {outcome.difference}, and is listed with another difference: {listed[0].shows!r}"


def table(outcomes: Iterable[Outcome], torch: str) -> list[str]:
    """A Markdown table: of each dtype how many operators equal the CPU's, differ, and ended their process."""
    lines = [
        "| torch | dtype | operators | equal the CPU's | listed | crashes |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    counts = {dtype: Counter[str]() for dtype in DTYPES}
    for outcome in outcomes:
        kind = "failure" if outcome.failure else "difference" if outcome.difference else "equal"
        counts[outcome.dtype][kind] += 1
    for dtype, count in counts.items():
        cells = (torch, dtype, count.total(), count["equal"], count["difference"], count["failure"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines
