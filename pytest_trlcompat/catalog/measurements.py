"""What the cells of the published sweep gave, and what is predicted for them, as sets of cells.

A question about all cells, such as which of them gave a verdict that is predicted for them as well, is a few operations
on sets, and no walk through thousands of verdicts. A set is an integer with a bit for each cell.

A wheel has this as ``measurements.json``, which its build writes; a checkout keeps it in the user's cache. Both are
made from the evidence and the catalogue, which were read and checked for it.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_trlcompat import _cache, _data, stack
from pytest_trlcompat.catalog.fixed_releases import FixedReleases
from pytest_trlcompat.catalog.issue import KnownIssue, Prediction
from pytest_trlcompat.catalog.ranges import Range, at
from pytest_trlcompat.catalog.remedies import Ways, ways_of
from pytest_trlcompat.catalog.verdict import Verdict

if TYPE_CHECKING:
    from pytest_trlcompat.catalog.evidence import Evidence, MeasuredCell
    from pytest_trlcompat.catalog.known_issues import Catalog

__all__ = ["FILE", "Cell", "CellSet", "Measurements", "published"]

FILE = Path(__file__).with_name("measurements.json")
"""Of a wheel; no checkout has it."""
_KIND = "measurements"
_CURES = Path(__file__).parents[1] / "trainers"

CellSet = int
Sets = Mapping[str, Mapping[str, Mapping[str, CellSet]]]
"""By issue, strategy and a word."""


class Cell(NamedTuple):
    """A cell that a sweep measured.

    Attributes:
        versions: of the packages of the stack.
    """

    id: str
    versions: Mapping[str, str]


class Measurements:
    """What the cells of a sweep gave with TRL's own trainers, see the module.

    Attributes:
        date: the day of the sweep, empty where there was none.
        cells: each bit of a set is one of them, by its place here.
        every: the set of all.
        attributed: those whose failures were attributed to other known issues, see
            :mod:`~pytest_trlcompat.catalog.evidence`.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        """
        Args:
            document: what :meth:`to_json` wrote.
        """
        self._document = document
        self.date: str = document["date"]
        self.cells = tuple(Cell(*cell) for cell in document["cells"])
        self.every: CellSet = (1 << len(self.cells)) - 1
        self.attributed: CellSet = document["attributed"]
        self._gave: Sets = document["gave"]
        self._blocked_by: Sets = document["blocked_by"]
        self._having: dict[str, dict[str, CellSet]] = {}
        self._first: Mapping[str, Mapping[str, Sequence[tuple[int, CellSet]]]] = document["first"]

    @classmethod
    def of(cls, catalog: Mapping[str, KnownIssue], evidence: Evidence) -> Measurements:
        """From the evidence itself, and the catalogue."""
        gave: dict[str, dict[str, dict[str, CellSet]]] = {}
        blocked_by: dict[str, dict[str, dict[str, CellSet]]] = {}
        fitting: dict[str, dict[str, CellSet]] = {}
        attributed = 0
        for number, cell in enumerate(evidence.cells):
            attributed |= cell.attributed << number
            for (name, subject, label), verdict in cell.verdicts.items():
                if subject == "upstream" and name in catalog and not catalog[name].is_search:
                    _add(gave.setdefault(name, {}).setdefault(label, {}), verdict.value, number)
            for (name, subject, label), blocker in cell.blocked_by.items():
                if subject == "upstream":
                    _add(blocked_by.setdefault(name, {}).setdefault(label, {}), blocker, number)
            for name, subject, label in sorted(cell.fitting):  # in an order that does not change the wheel
                if subject == "upstream":
                    _add(fitting.setdefault(name, {}), label, number)
        versions = [cell.versions for cell in evidence.cells]
        holds = functools.cache(lambda package, text: _holding(package, text, versions))
        first = {
            issue.id: {
                label: list(_first_for(issue, label, holds, (1 << len(versions)) - 1))
                for label in dict.fromkeys([*issue.labels(), *gave.get(issue.id, ())])
            }
            for issue in catalog.values()
            if not issue.is_search
        }
        return cls(
            {
                "date": evidence.date,
                "cells": [[cell.id, dict(cell.versions)] for cell in evidence.cells],
                "attributed": attributed,
                "gave": gave,
                "blocked_by": blocked_by,
                "fitting": fitting,
                "first": first,
                "ways": _StoredWays(catalog, evidence.cells),
            }
        )

    def to_json(self, made_from: str = "") -> str:
        """
        Args:
            made_from: what changes with the evidence and the catalogue; empty in a wheel, where nothing changes.
        """
        document = {"made_from": made_from, **self._document}
        # JSON would have what was asked for so far alone: the mapping makes the rest on demand.
        document["ways"] = {name: document["ways"][name] for name in self._first}
        return json.dumps(document, separators=(",", ":")) + "\n"

    def gave(self, issue_id: str, label: str, verdict: Verdict, by: str = "") -> CellSet:
        """The cells that measured this verdict, or what it was called before failures were attributed.

        Args:
            by: of ``blocked`` the known issue that must have stopped the suite; empty for any.
        """
        verdicts = self.verdicts(issue_id).get(label, {})
        measured = verdicts.get(verdict.value, 0)
        if verdict is not Verdict.BLOCKED:
            return measured
        if by:
            # Cells that do not say who blocked stay, as in MeasuredCell.gave.
            for blocker, cells in self._blocked_by.get(issue_id, {}).get(label, {}).items():
                if blocker != by:
                    measured &= ~cells
        return measured | verdicts.get(Verdict.ERROR.value, 0) & ~self.attributed

    def verdicts(self, issue_id: str) -> Mapping[str, Mapping[str, CellSet]]:
        """By strategy, variants included, the cells that measured each verdict on an issue."""
        return self._gave.get(issue_id, {})

    def fitting(self, issue_id: str, label: str) -> CellSet:
        """The cells whose verdict fits whatever is predicted, see :attr:`MeasuredCell.fitting
        <pytest_trlcompat.catalog.evidence.MeasuredCell.fitting>`."""
        cells: CellSet = self._document["fitting"].get(issue_id, {}).get(label, 0)
        return cells

    def predicted(self, issue: KnownIssue, label: str) -> list[tuple[Prediction, CellSet]]:
        """The predictions for TRL's own trainer that decide for some cell, each with those for which it is the first
        that applies.

        Args:
            label: one of the issue's, or under which it was measured.
        """
        return [(issue.predictions[number], cells) for number, cells in self._first[issue.id][label]]

    def where(self, package: str, holds: Callable[[Range], bool]) -> CellSet:
        """The cells for whose version of a package something holds."""
        return sum(cells for text, cells in self.having(package).items() if text and holds(at(text)))

    def having(self, package: str) -> Mapping[str, CellSet]:
        """By version of a package the cells that have it; by an empty text those without the package."""
        if package not in self._having:
            sets = self._having[package] = {}
            for number, cell in enumerate(self.cells):
                _add(sets, cell.versions.get(package, ""), number)
        return self._having[package]

    def ways(self, issue: KnownIssue) -> Ways:
        """What is known to help with an issue, with what the cells have measured with the releases that are right."""
        fixed, mixins, configs = self._document["ways"][issue.id]
        return Ways(tuple(map(FixedReleases.restored, fixed)), tuple(mixins), tuple(configs))


class _StoredWays(dict[str, list[Any]]):
    """By known issue what helps, as JSON holds it, made when it is first asked for: an answer asks about few issues."""

    def __init__(self, catalog: Mapping[str, KnownIssue], cells: Sequence[MeasuredCell]) -> None:
        super().__init__()
        self._catalog, self._cells = catalog, cells

    def __missing__(self, name: str) -> list[Any]:
        ways = ways_of(self._catalog[name], self._cells)
        self[name] = stored = [[fixed.stored() for fixed in ways.fixed], ways.mixins, ways.configs]
        return stored


def _add(sets: dict[str, CellSet], key: str, number: int) -> None:
    sets[key] = sets.get(key, 0) | 1 << number


def _holding(package: str, text: str, versions: Sequence[Mapping[str, str]]) -> CellSet:
    """The cells for which one range holds."""
    return sum(stack.holds({package: text}, cell) << number for number, cell in enumerate(versions))


def _first_for(
    issue: KnownIssue, label: str, holds: Callable[[str, str], CellSet], every: CellSet
) -> Iterator[tuple[int, CellSet]]:
    """The numbers of the predictions that decide for some cell, as :meth:`KnownIssue.predict` finds them."""
    left = every
    for number, prediction in enumerate(issue.predictions):
        if prediction.concerns("upstream", label):
            here = left
            for package, text in prediction.when.items():
                here &= holds(package, text)
            if here:
                yield number, here
            # The first prediction that applies decides.
            left &= ~here


def _sources(folder: Path) -> list[str]:
    """What it is made from in addition to the catalogue: the evidence, and the cures, whose texts name mixins."""
    return [str(folder / "evidence.json"), *_cache.files(_CURES, ".py")]


def published(catalog: Catalog) -> Measurements:
    """Those of the evidence that ships with this package.

    Args:
        catalog: the one that ships with it; of another one nothing is kept.

    Raises:
        EvidenceError: the evidence cannot be read.
    """
    if catalog.made_from and FILE.is_file():
        return Measurements(json.loads(FILE.read_text(encoding="utf-8")))
    folder = _data.fixtures()
    made_from = catalog.made_from and f"{catalog.made_from} {_cache.stamp(_sources(folder))}"
    if made_from and (text := _cache.read(folder, _KIND)) is not None:
        # What is damaged is made anew.
        with contextlib.suppress(KeyError, TypeError, ValueError):
            document = json.loads(text)
            if document["made_from"] == made_from:
                return Measurements(document)
    from pytest_trlcompat.catalog import evidence  # reading it takes ten times as long as what is kept

    measured = Measurements.of(catalog, evidence.published())
    if made_from:
        _cache.write(folder, measured.to_json(made_from), _KIND)
    return measured
