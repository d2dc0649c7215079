"""Parts of a sweep for as many machines: ``--shard 3/16``, balanced by what the cells took before, and merged again.

Every machine computes the same parts, from what the repository has.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pytest_trlcompat._due import Account
from pytest_trlcompat._provenance import Provenance, difference
from pytest_trlcompat.catalog.evidence import EvidenceError, load
from pytest_trlcompat.catalog.verdict import Verdict
from pytest_trlcompat.matrix.cells import Cell
from pytest_trlcompat.matrix.errors import MatrixError
from pytest_trlcompat.matrix.files import write_whole
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.results import TESTED, Sidecar, read_sidecar

__all__ = [
    "SHARD",
    "account_of_parts",
    "bring_together",
    "costs",
    "keep_part",
    "keep_seconds",
    "requested_shard",
    "shard_of",
]

SHARD = "--shard"
"""Option of ``matrix``: ``3/16`` is the third of sixteen parts of the cells."""

_PART = "part-"
"""How the file begins that says which part of a sweep a folder's results are: ``part-3.json``."""
_RESULTS = (".cell.json", ".jsonl")
_REMOVE = "remove one of them"


def keep_part(layout: Layout, cells: Sequence[Cell], shard: tuple[int, int]) -> None:
    """Write down which part the results of a folder are, and which cells were due in it, before the first one runs."""
    number, parts = shard
    due = {"part": number, "parts": parts, "cells": [cell.id for cell in cells]}
    write_whole(layout.results / f"{_PART}{number}.json", json.dumps(due) + "\n")


def account_of_parts(folders: Iterable[Path], results: Path) -> Account[str]:
    """The parts of a sweep and their cells, met where they left results; nothing is due where no folder is a part.

    Raises:
        MatrixError: a file that says which part results are cannot be read.
    """
    parts: dict[int, list[str]] = {}
    number_of_parts = 0
    for path in sorted(path for folder in folders for path in folder.glob(f"{_PART}*.json")):
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            parts[int(raw["part"])] = [str(cell) for cell in raw["cells"]]
            number_of_parts = max(number_of_parts, int(raw["parts"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise MatrixError(
                f"{path}: it does not say which part of a sweep this is ({error!r}); run it again"
            ) from error
    names = [f"part {number}" for number in range(1, number_of_parts + 1)]
    cells = [cell for part in parts.values() for cell in part]
    account = Account("parts and cells", [*names, *cells])
    account.meet_all(f"part {number}" for number in parts)
    account.meet_all(cell for cell in cells if (results / f"{cell}{_RESULTS[0]}").is_file())
    return account


def _check_code(paths: Iterable[Path]) -> None:
    """
    Raises:
        MatrixError: two of these cells were measured with other code, or of one of them it is not known.
    """
    sidecars = [read_sidecar(path) for path in paths if path.name.endswith(_RESULTS[0])]
    tested = [sidecar for sidecar in sidecars if sidecar.state == TESTED]
    for sidecar in tested[1:]:
        first, other = (Provenance.parse(measured.provenance) for measured in (tested[0], sidecar))
        if why := difference(dataclasses.replace(other, packages=first.packages), first):
            raise MatrixError(
                f"{sidecar.id} was measured {why} than {tested[0].id}, or nobody wrote it down; parts of one sweep are "
                "measured with one version of this project: run them again"
            )


def requested_shard(arguments: Sequence[str]) -> tuple[int, int] | None:
    """The part that the arguments of a session ask for, from 1, and how many there are; ``None`` for all cells.

    Raises:
        MatrixError: it is no part.
    """
    for index, argument in enumerate(arguments):
        # Without the parser, as in requested_pairwise: nox asks for sessions that other arguments belong to, too.
        if argument.partition("=")[0] == SHARD:
            text = argument.partition("=")[2] or "".join(arguments[index + 1 : index + 2])
            match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
            if match is None or int(match[1]) > int(match[2]):
                raise MatrixError(f"{SHARD} {text!r} is no part; write for example 3/16, the third of sixteen")
            return int(match[1]), int(match[2])
    return None


def shard_of(cells: Sequence[Cell], cost: Mapping[str, float], shard: tuple[int, int]) -> tuple[Cell, ...]:
    """One part of the cells, in their order: the dearest first, each to the part that has least so far (LPT).

    R. L. Graham, Bounds on Multiprocessing Timing Anomalies, 1969: at most a third longer than the best division.

    Raises:
        MatrixError: there are more parts than cells, so that some would be empty.
    """
    number, parts = shard
    if parts > len(cells):
        raise MatrixError(f"{SHARD} {number}/{parts}: there are {len(cells)} cells; ask for {len(cells)} parts at most")
    middle = statistics.median(cost.values()) if cost else 1.0
    heap = [(0.0, part) for part in range(1, parts + 1)]
    chosen: dict[str, int] = {}
    # By id where costs are equal: every machine must come to the same parts.
    for cell in sorted(cells, key=lambda cell: (-cost.get(cell.id, middle), cell.id)):
        load, part = heapq.heappop(heap)
        chosen[cell.id] = part
        heapq.heappush(heap, (load + cost.get(cell.id, middle), part))
    return tuple(cell for cell in cells if chosen[cell.id] == number)


def costs(layout: Layout) -> dict[str, float]:
    """What cells cost, in seconds where a published sweep took some, else estimated by their number of verdicts."""
    try:
        seconds = {str(name): float(value) for name, value in json.loads(layout.seconds.read_text()).items()}
    except FileNotFoundError:
        seconds = {}
    except (ValueError, AttributeError, TypeError) as error:
        raise MatrixError(f"{layout.seconds}: {error}; publish a sweep again, which writes it") from error
    try:
        cells = load(layout.evidence).cells
    except EvidenceError:
        # Cells of which nothing is known count as the middle one does, see shard_of.
        cells = ()
    verdicts = {cell.id: sum(verdict is not Verdict.ABSENT for verdict in cell.verdicts.values()) for cell in cells}
    both = [name for name in seconds if verdicts.get(name)]
    rate = sum(seconds[name] for name in both) / sum(verdicts[name] for name in both) if both else 1.0
    return {**{name: count * rate for name, count in verdicts.items()}, **seconds}


def keep_seconds(sidecars: Iterable[Sidecar], layout: Layout) -> None:
    """Write how many seconds the cells of a published sweep took, and keep the numbers of other cells."""
    try:
        before = json.loads(layout.seconds.read_text())
    except FileNotFoundError:
        before = {}
    taken = {sidecar.id: round(sidecar.seconds, 1) for sidecar in sidecars if sidecar.seconds}
    write_whole(layout.seconds, json.dumps(dict(sorted({**before, **taken}.items())), indent=0) + "\n")


def bring_together(folders: Sequence[Path], results: Path) -> int:
    """Copy the results of the parts, ``build/compat`` of each, into one folder; returns the number of cells.

    Raises:
        MatrixError: a folder has none, or a cell has other results in two of them, or parts were measured with other
            code than others; nothing is then copied.
    """
    results_of: dict[str, Path] = {}
    for folder in folders:
        paths = [path for path in sorted(folder.glob("*")) if path.name.endswith(_RESULTS)] if folder.is_dir() else []
        if not paths:
            raise MatrixError(f"{folder} has no results of a sweep; name folders that were build/compat")
        for path in paths:
            other = results_of.setdefault(path.name, path)
            if other.read_bytes() != path.read_bytes():
                raise MatrixError(
                    f"{path.name} is another one in {path.parent} than in {other.parent}; remove one of them"
                )
    _check_code(
        [*results_of.values(), *(path for path in results.glob(f"*{_RESULTS[0]}") if path.name not in results_of)]
    )
    for name, path in results_of.items():
        here = results / name
        if here.exists() and here.read_bytes() != path.read_bytes():
            raise MatrixError(f"{name} is another one in {path.parent} than in {results}; {_REMOVE}")
    for name, path in results_of.items():
        write_whole(results / name, path.read_bytes())
    return sum(name.endswith(_RESULTS[0]) for name in results_of)
