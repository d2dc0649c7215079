"""Which cells follow from new releases: the newest of all, and each new release alone in the newest known stack.

A cell follows from its releases alone, not from the day on which somebody asks, so that it is measured once. Imports
the matrix alone.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_trlcompat.matrix import locks
from pytest_trlcompat.matrix.cells import ORDER, Cell, Matrix
from pytest_trlcompat.matrix.covering.releases import Release
from pytest_trlcompat.matrix.errors import Unreachable, Untestable
from pytest_trlcompat.matrix.files import write_whole
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.matrix.locks import Lock, compile_versions
from pytest_trlcompat.matrix.parsing import parse_day
from pytest_trlcompat.matrix.results import TESTED, Sidecar, read_sidecars
from pytest_trlcompat.stack import REQUIRED
from pytest_trlcompat.watch.known import Known

__all__ = ["WatchedCell", "as_measured", "base_cell", "make_plan"]

_NAMED = ("trl", "transformers")
"""Pinned in every cell, as in the matrix."""


@dataclass(frozen=True)
class WatchedCell:
    """A cell that new releases ask for.

    Attributes:
        stack: package to version, as far as it could be resolved.
        release: what is new in it; ``None`` in the newest of all, where several releases are.
        previous: the version of that package before it; empty where none is known.
        moved: what else is not as in the newest known stack, since it had to move, as ``peft 0.20.0``.
    """

    cell: Cell
    stack: Mapping[str, str]
    release: Release | None = None
    previous: str = ""
    moved: tuple[str, ...] = ()

    @property
    def about(self) -> str:
        """For people: ``trl 1.17.0 alone``."""
        return f"{self.release} alone" if self.release else "the newest of all"


def make_plan(matrix: Matrix, layout: Layout, known: Known, new: Sequence[Release]) -> list[WatchedCell]:
    """The cells, the newest of all first, then the newest releases, those of TRL before others; equal ones once.

    Raises:
        Unreachable: when the index cannot be reached.
    """
    order = sorted(new, key=lambda each: (each.package != "trl", each.package != "transformers"))
    order.sort(key=lambda each: each.day, reverse=True)
    everything = _newest_of_all(matrix, layout, new)
    # Afterwards, since the lock of a release alone holds what is no part of the stack, also where it is the newest.
    alone = [_alone(matrix, layout, known, release) for release in order]
    if everything is None or any(dict(each.stack) == dict(everything.stack) for each in alone):
        return alone  # the newest of all is one of them
    return [everything, *alone]


def as_measured(layout: Layout, known: Known) -> Known:
    """What is known, with the lock of the newest known stack as it was measured, if it was."""
    measured = _measured(layout, _of_stack(known.base.packages))
    if measured is None:
        return known
    day = parse_day(measured.date)
    return replace(known, base=replace(known.base, cell_id=measured.id, date=day, packages=dict(measured.lock)))


def base_cell(matrix: Matrix, layout: Layout, known: Known) -> WatchedCell:
    """The newest known stack as a cell: what new releases are held against, where it has not been measured."""
    stack = _of_stack(known.base.packages)
    return WatchedCell(_fewest_pins(matrix, layout, stack, "trl", known.base.date), stack)


def _alone(matrix: Matrix, layout: Layout, known: Known, release: Release) -> WatchedCell:
    base, date = known.base, release.day + datetime.timedelta(days=1)
    preferred = [line for line in base.requirements if line.partition("==")[0] != release.package]
    asked = matrix.requirements(Cell({release.package: release.version}, date))
    try:
        found = compile_versions(matrix, asked, max(date, base.date), preferred)
    except Unreachable:
        raise
    except Untestable:  # the cell itself says why, when it is run
        pins = {**{name: base.packages[name] for name in _NAMED}, release.package: release.version}
        pins = {name: pins[name] for name in ORDER if name in pins}
        return WatchedCell(Cell(pins, date), {}, release, known.previous(release.package, release.version))
    stack = _of_stack(found)
    moved = tuple(
        f"{name} {version}"
        for name, version in stack.items()
        if name != release.package and version != base.packages.get(name)
    )
    cell = _fewest_pins(matrix, layout, stack, release.package, max(date, base.date))
    if _measured(layout, stack) is None:
        # What is no part of the stack stays as well, where the resolver would have taken what came out since.
        _keep_lock(matrix, layout, cell, found)
    return WatchedCell(cell, stack, release, known.previous(release.package, release.version), moved)


def _newest_of_all(matrix: Matrix, layout: Layout, new: Iterable[Release]) -> WatchedCell | None:
    """``None`` where it cannot be resolved: each release alone then says why."""
    date = max(release.day for release in new) + datetime.timedelta(days=1)
    try:
        stack = _of_stack(locks.resolve(matrix, Cell({}, date)).packages)
    except Unreachable:
        raise
    except Untestable:
        return None
    return WatchedCell(_fewest_pins(matrix, layout, stack, "trl", date), stack)


def _fewest_pins(matrix: Matrix, layout: Layout, stack: Mapping[str, str], package: str, date: datetime.date) -> Cell:
    """A cell that resolves to a stack: one that was measured, or else as few pins as are needed beside its date."""
    default = matrix.pins.get("torch")

    def ordered(pins: Mapping[str, str]) -> dict[str, str]:
        return {name: pins[name] for name in ORDER if name in pins and (name, pins[name]) != ("torch", default)}

    measured = _measured(layout, stack)
    if measured is not None:
        return Cell(ordered(measured.pins), parse_day(measured.date))
    pins = {name: stack[name] for name in (*_NAMED, package)}
    while True:
        cell = Cell(ordered(pins), date)
        lock = _resolved(matrix, layout, cell)
        others = [dict(lock.packages) if lock is not None else {}]
        # That of a cell whose name it may not take.
        others += [dict(each.lock) for each in read_sidecars(layout) if each.id == cell.id and each.state == TESTED]
        needed = {name: version for name, version in stack.items() for other in others if other.get(name) != version}
        if not needed.keys() - pins.keys():
            return cell
        pins.update(needed)


def _resolved(matrix: Matrix, layout: Layout, cell: Cell) -> Lock | None:
    try:
        lock = locks.resolve(matrix, cell)
    except Unreachable:
        raise
    except Untestable:
        return None
    _keep_lock(matrix, layout, cell, lock.packages)
    return lock


def _keep_lock(matrix: Matrix, layout: Layout, cell: Cell, packages: Mapping[str, str]) -> None:
    assert cell.date is not None
    lock = Lock(cell.id, cell.date, matrix.python_of(cell), packages, locks.request_of(matrix, cell))
    write_whole(layout.resolved / f"{cell.id}.txt", lock.to_text())


def _measured(layout: Layout, stack: Mapping[str, str]) -> Sidecar | None:
    """A cell of the same stack that has its verdicts, whatever its name."""
    found = (each for each in read_sidecars(layout) if each.state == TESTED)
    return next((each for each in found if _of_stack(each.lock) == dict(stack)), None)


def _of_stack(packages: Mapping[str, str]) -> dict[str, str]:
    return {package: packages[package] for package in REQUIRED if package in packages}
