"""The verdicts of the published sweep: which cells were measured, with which versions, and what came out.

Ships with the package as ``fixtures/evidence.json``, so that an installed stack can be held against it without running
anything.

Failures are attributed to other known issues (the verdict ``blocked``) from schema 2 on. What was measured before says
``error`` for every failure that is not the issue's own symptom, whoever caused it. Such an ``error`` stays an ``error``
here: nobody looked for the cause then, so none is claimed now. It counts as measured for a prediction of ``blocked``,
since the suite did fail, and with another failure than its own, as that prediction says; which issue stopped it rests
on the catalogue until the cell is measured again. See :meth:`MeasuredCell.gave`.

From schema 3 on a verdict says whether it fits whatever is predicted of its issue, see :attr:`MeasuredCell.fitting`.
From schema 4 on a cell says with which code and packages it was measured, and when: see :class:`Origin`. The origin of
older measurements is unknown, and an unknown origin equals no other.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from pytest_trlcompat import _data
from pytest_trlcompat._json_files import Unreadable, parse, read_text
from pytest_trlcompat._provenance import Provenance
from pytest_trlcompat.catalog.evidence_fields import EvidenceError, check_names, day, field_of, stack
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.stack import PACKAGES

__all__ = [
    "Evidence",
    "EvidenceError",
    "Key",
    "MeasuredCell",
    "Origin",
    "fingerprint",
    "load",
    "origins_of",
    "published",
    "published_torches",
]

Key = tuple[str, str, str]
"""Issue, subject, strategy."""

_SCHEMA = 4
_UNATTRIBUTED = 1
"""The schema in which no cell's failures are attributed; read, no longer written."""
_READ = range(_UNATTRIBUTED, _SCHEMA + 1)
_BY = " by "
_BLOCKED_BY = f"{Verdict.BLOCKED.value}{_BY}"
"""Of such a verdict the text names the known issue as well: ``blocked by grpo-evaluate``."""
_FITTING = " (fits)"
"""How the text of such a verdict ends."""
_ORIGIN = " @"
"""How the text of a verdict goes on that has another origin than most of its cell: ``ok @1``, the second of them."""
_VERDICTS = {verdict.value: verdict for verdict in Verdict}
"""Ten times as fast as ``Verdict(text)``; a sweep has thousands."""


class Origin(NamedTuple):
    """Where a published verdict comes from.

    Attributes:
        provenance: the code and packages, as :class:`pytest_trlcompat._provenance.Provenance` writes them; empty where
            nobody wrote them down.
        day: of the sweep that measured it.
    """

    provenance: str
    day: str


@dataclass(frozen=True)
class MeasuredCell:
    """One cell that a sweep measured.

    Attributes:
        versions: the packages of the stack, as they were installed.
        date: the day as of which it was resolved.
        blocked_by: of verdicts ``blocked`` the id of the known issue that stopped the suite, as far as it is known.
        attributed: whether failures that another known issue explains are ``blocked``, apart from those that
            nobody explains; see above.
        fitting: verdicts that fit whatever is predicted of their issue, see :attr:`Record.fitting
            <pytest_trlcompat.catalog.verdict.Record.fitting>`.
        origin: of its verdicts; ``None`` where it is not known, as of what was published before schema 4.
        other_origins: of those of its verdicts that were kept from another sweep than most.
    """

    id: str
    versions: Mapping[str, str]
    verdicts: Mapping[Key, Verdict]
    date: str | None = None
    attributed: bool = True
    blocked_by: Mapping[Key, str] = field(default_factory=dict)
    fitting: frozenset[Key] = frozenset()
    origin: Origin | None = None
    other_origins: Mapping[Key, Origin] = field(default_factory=dict)

    def origin_of(self, key: Key, day: str = "") -> Origin:
        """Where a verdict comes from.

        Args:
            day: of the evidence, for a verdict of which nobody wrote it down.
        """
        return self.other_origins.get(key) or self.origin or Origin("", day)

    @functools.cached_property
    def problems(self) -> Mapping[str, list[tuple[str, Verdict]]]:
        """By known issue, under which strategies TRL's own trainer showed which problem."""
        problems: dict[str, list[tuple[str, Verdict]]] = {}
        for (issue, subject, label), verdict in self.verdicts.items():
            if subject == "upstream" and verdict.is_problem:
                problems.setdefault(issue, []).append((label, verdict))
        return problems

    def gave(self, key: Key, verdict: Verdict, by: str = "") -> bool:
        """Whether it measured this verdict, or what it was called before failures were attributed.

        Args:
            by: of ``blocked`` the known issue that must have stopped the suite; empty for any.
        """
        measured = self.verdicts.get(key)
        # Before failures were attributed, one that another issue had caused was an error as well; see the module.
        if verdict is Verdict.BLOCKED and measured is Verdict.ERROR:
            return not self.attributed
        if measured is Verdict.BLOCKED and by and self.blocked_by.get(key, by) != by:
            return False
        return measured is verdict


@dataclass(frozen=True)
class Evidence:
    """What one sweep measured.

    Attributes:
        date: the day of the sweep, ``""`` where there was none.
    """

    date: str = ""
    cells: tuple[MeasuredCell, ...] = field(default=())

    @functools.cached_property
    def torches(self) -> tuple[str, ...]:
        """The releases of torch that its cells have, oldest first."""
        return tuple(sorted({cell.versions["torch"] for cell in self.cells if "torch" in cell.versions}, key=Version))

    def strategies(self, issue_id: str) -> list[str]:
        """The strategies, variants included, under which some cell measured an issue."""
        return sorted(strategy for issue, strategy in self._measured if issue == issue_id)

    @functools.cached_property
    def _measured(self) -> frozenset[tuple[str, str]]:
        return frozenset((issue, strategy) for cell in self.cells for issue, _, strategy in cell.verdicts)

    def to_json(self) -> str:
        """As its file has it; see :meth:`from_json`."""
        # Without its closing brace: the cells follow, each on a line of its own.
        head = json.dumps({"schema": _SCHEMA, "date": self.date, "torch": self.torches})[:-1]
        # A line for each cell, so that a new sweep reads well in a diff.
        cells = ",\n".join(json.dumps(_to_dict(cell)) for cell in self.cells)
        return f'{head}, "cells": [\n{cells}\n]}}\n'

    @classmethod
    def from_json(cls, text: str) -> Evidence:
        """The inverse of :meth:`to_json`.

        Raises:
            EvidenceError: for anything else.
        """
        try:
            raw = parse(text)
            if not isinstance(raw, dict):
                raise Unreadable("it is no object")
            schema = raw.get("schema")
            if isinstance(schema, bool) or schema not in _READ:
                raise EvidenceError(f"a schema from {_READ[0]} to {_READ[-1]} was expected, {schema!r} was found")
            cells = field_of(raw, "cells", list)
            return cls(
                day(field_of(raw, "date", str)), tuple(_from_dict(cell, schema != _UNATTRIBUTED) for cell in cells)
            )
        except Unreadable as error:
            raise EvidenceError(f"not the evidence of a sweep ({error})") from error


def _to_dict(cell: MeasuredCell) -> dict[str, Any]:
    verdicts: dict[str, dict[str, dict[str, str]]] = {}
    origins = list(dict.fromkeys([*([cell.origin] if cell.origin else []), *cell.other_origins.values()]))
    for key, verdict in cell.verdicts.items():
        issue, subject, strategy = key
        at = f"{_ORIGIN}{origins.index(cell.other_origins[key])}" if key in cell.other_origins else ""
        by = f"{_BY}{cell.blocked_by[key]}" if cell.blocked_by.get(key) else ""
        text = f"{verdict.value}{by}{_FITTING if key in cell.fitting else ''}{at}"
        verdicts.setdefault(issue, {}).setdefault(subject, {})[strategy] = text
    stack = {package: cell.versions[package] for package in PACKAGES if package in cell.versions}
    mark = {} if cell.attributed else {"attributed": False}
    measured = {"measured": [list(origin) for origin in origins]} if origins else {}
    return {"id": cell.id, "date": cell.date, "stack": stack, **mark, **measured, "verdicts": verdicts}


def _from_dict(raw: Any, attributed: bool) -> MeasuredCell:
    cell_id = field_of(raw, "id", str)
    try:
        known = attributed and bool(raw.get("attributed", True))
        date = None if raw.get("date", "") is None else day(field_of(raw, "date", str))
        origins = origins_of(raw.get("measured", []))
        texts, others = _with_origins(field_of(raw, "verdicts", dict), origins)
        verdicts, blocked_by, fitting = _verdicts(texts)
        check_names({cell_id, *blocked_by.values()})
        versions, origin = stack(field_of(raw, "stack", dict)), next(iter(origins), None)
        return MeasuredCell(cell_id, versions, verdicts, date, known, blocked_by, fitting, origin, others)
    except Unreadable as error:
        raise Unreadable(f"the cell {cell_id[:100]!r}: {error}") from error


def origins_of(raw: Any) -> list[Origin]:
    """The origins of a cell's verdicts, that of most of them first.

    Raises:
        Unreadable: it is something else.
    """
    pairs = raw if isinstance(raw, list) else [raw]
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise Unreadable(f"'measured' is no list of provenances and days: {str(pair)[:100]!r}")
        if pair[0] and not Provenance.parse(pair[0]).is_known:
            raise Unreadable(f"'measured' names no digests of code and packages: {pair[0][:100]!r}")
    return [Origin(provenance, day(text)) for provenance, text in pairs]


def _with_origins(raw: Mapping[str, Any], origins: Sequence[Origin]) -> tuple[Mapping[str, Any], dict[Key, Origin]]:
    """The texts of the verdicts without their origins, and the origins that are not the first."""
    if len(origins) < 2:
        return raw, {}
    others: dict[Key, Origin] = {}
    try:
        texts: dict[str, Any] = {}
        for issue, subjects in raw.items():
            texts[issue] = {}
            for subject, strategies in subjects.items():
                texts[issue][subject] = {}
                for strategy, text in strategies.items():
                    # The origin stands last, so it is taken off before the rest of the text is read.
                    verdict, _, number = text.partition(_ORIGIN)
                    texts[issue][subject][strategy] = verdict
                    if number:
                        others[issue, subject, strategy] = origins[int(number)]
    except (AttributeError, IndexError, ValueError) as error:
        raise Unreadable(f"the origins of its verdicts cannot be read ({error!r:.200})") from error
    return texts, others


def _verdicts(raw: Mapping[str, Any]) -> tuple[dict[Key, Verdict], dict[Key, str], frozenset[Key]]:
    names = set(raw)
    try:
        for subjects in raw.values():
            names.update(subjects, *subjects.values())
        texts = {
            (issue, subject, strategy): text
            for issue, subjects in raw.items()
            for subject, strategies in subjects.items()
            for strategy, text in strategies.items()
        }
        fitting = frozenset(key for key, text in texts.items() if text.endswith(_FITTING))
        texts |= {key: texts[key].removesuffix(_FITTING) for key in fitting}
        by = {key: text.removeprefix(_BLOCKED_BY) for key, text in texts.items() if text.startswith(_BLOCKED_BY)}
        verdicts = {key: Verdict.BLOCKED if key in by else _VERDICTS[text] for key, text in texts.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"its verdicts cannot be read ({error!r:.200})") from error
    check_names(names)
    return verdicts, by, fitting


def load(path: Path) -> Evidence:
    """Read a file of evidence.

    Raises:
        EvidenceError: it is missing or no evidence; the text names it.
    """
    try:
        return Evidence.from_json(read_text(path))
    except ValueError as error:
        raise EvidenceError(f"{path}: {error}; make it again with: nox -s report -- --publish") from error


def published_torches() -> tuple[str, ...]:
    """:attr:`Evidence.torches` of :func:`published`, from its first line alone; empty where that has none."""
    try:
        with open(_published(), encoding="utf-8") as file:
            # to_json ends its first line within the list of cells, which is closed here.
            return tuple(json.loads(f"{file.readline()}]}}")["torch"])
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def fingerprint() -> tuple[int, int]:
    """Changes when the published evidence does; costs no reading."""
    try:
        status = _published().stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _published() -> Path:
    return _data.fixtures() / "evidence.json"


@functools.cache
def published() -> Evidence:
    """The evidence that ships with this package.

    Raises:
        EvidenceError: as :func:`load`.
    """
    return load(_published())
