"""Which cells follow from new releases: the newest of all, and each new release alone in the newest known stack.

A commit of a local clone is tried alone as well, and is no part of the newest of all. A cell follows from its releases
alone, not from the day on which somebody asks, so that it is measured once.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from pytest_trlcompat.watch.commits import WatchedCommit
from pytest_trlcompat.watch.known import Known

__all__ = ["WatchedCell", "as_measured", "base_cell", "cell_of_commit", "make_plan"]

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
        commit: which stands for a release that is not out yet.
    """

    cell: Cell
    stack: Mapping[str, str]
    release: Release | None = None
    previous: str = ""
    moved: tuple[str, ...] = ()
    commit: WatchedCommit | None = None

    @property
    def package(self) -> str:
        """Which is new in it; empty where several are."""
        return self.release.package if self.release else ""

    @property
    def about(self) -> str:
        """For people: ``trl 1.17.0 alone``."""
        return f"{self.release} alone" if self.release else "the newest of all"


def make_plan(matrix: Matrix, layout: Layout, known: Known, new: Sequence[Release]) -> list[WatchedCell]:
    """The cells, the newest of all first, then the newest releases, those of TRL before others; equal ones once.

    Raises:
        Unreachable: when the index cannot be reached.
    """
    if not new:
        return []
    order = sorted(new, key=lambda release: (release.package != "trl", release.package != "transformers"))
    # A second, stable sort: releases of one day stay as the first one has put them.
    order.sort(key=lambda release: release.day, reverse=True)
    everything = _newest_of_all(matrix, layout, new)
    # Afterwards, since the lock of a release alone holds what is no part of the stack, also where it is the newest.
    alone = [_alone(matrix, layout, known, release) for release in order]
    if everything is None or any(dict(watched.stack) == dict(everything.stack) for watched in alone):
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
        # The newest known stack may have packages that came later than this release.
        packages = compile_versions(matrix, asked, max(date, base.date), preferred)
    # Also an Untestable, but one that says nothing of the release.
    except Unreachable:
        raise
    except Untestable:  # the cell itself says why, when it is run
        pins = {**{name: base.packages[name] for name in _NAMED}, release.package: release.version}
        pins = {name: pins[name] for name in ORDER if name in pins}
        return WatchedCell(Cell(pins, date), {}, release, known.previous(release.package, release.version))
    stack = _of_stack(packages)
    cell = _fewest_pins(matrix, layout, stack, release.package, max(date, base.date))
    if _measured(layout, stack) is None:
        # What is no part of the stack stays as well, where the resolver would have taken what came out since.
        _keep_lock(matrix, layout, cell, packages)
    return _watched(cell, stack, release, known)


def cell_of_commit(matrix: Matrix, layout: Layout, known: Known, commit: WatchedCommit) -> WatchedCell:
    """A commit alone in the newest known stack, of which moves what the commit requires to move.

    Raises:
        Untestable: when nothing can be resolved with it, with the resolver's reason.
    """
    base, wheel, package = known.base, commit.wheel, commit.package
    date = max(commit.day + datetime.timedelta(days=1), base.date)
    preferred = [line for line in base.requirements if line.partition("==")[0] != package]
    asked = matrix.requirements(Cell({package: wheel.public}, date))
    resolved_packages = compile_versions(matrix, asked, date, preferred, wheels=[str(wheel.path.parent)])
    packages = {**resolved_packages, package: wheel.version}
    stack = _of_stack(packages)

    def resolved(cell: Cell) -> Lock:
        return Lock(cell.id, date, matrix.python_of(cell), packages, locks.request_of(matrix, cell))

    cell = _fewest_pins(matrix, layout, stack, package, date, resolved)
    _keep_lock(matrix, layout, cell, packages)
    return replace(_watched(cell, stack, commit.release, known), commit=commit)


def _watched(cell: Cell, stack: Mapping[str, str], release: Release, known: Known) -> WatchedCell:
    moved = tuple(
        f"{name} {version}"
        for name, version in stack.items()
        if name != release.package and version != known.base.packages.get(name)
    )
    return WatchedCell(cell, stack, release, known.previous(release.package, release.version), moved)


def _newest_of_all(matrix: Matrix, layout: Layout, new: Iterable[Release]) -> WatchedCell | None:
    """``None`` where it cannot be resolved: each release alone then says why."""
    # The resolver leaves out what came on the day itself: the day after is the first that has the release.
    date = max(release.day for release in new) + datetime.timedelta(days=1)
    try:
        stack = _of_stack(locks.resolve(matrix, Cell({}, date)).packages)
    except Unreachable:
        raise
    except Untestable:
        return None
    return WatchedCell(_fewest_pins(matrix, layout, stack, "trl", date), stack)


def _fewest_pins(
    matrix: Matrix,
    layout: Layout,
    stack: Mapping[str, str],
    package: str,
    date: datetime.date,
    resolved: Callable[[Cell], Lock | None] | None = None,
) -> Cell:
    """A cell that resolves to a stack: one that was measured, or else one with its date and as few pins as are needed.

    Args:
        resolved: what a cell resolves to, where not the index says it.
    """
    default = matrix.pins.get("torch")

    def ordered(pins: Mapping[str, str]) -> dict[str, str]:
        return {name: pins[name] for name in ORDER if name in pins and (name, pins[name]) != ("torch", default)}

    measured = _measured(layout, stack)
    if measured is not None:
        return Cell(ordered(measured.pins), parse_day(measured.date))
    pins = {name: stack[name] for name in (*_NAMED, package)}
    while True:
        cell = Cell(ordered(pins), date)
        lock = resolved(cell) if resolved is not None else _resolved(matrix, layout, cell)
        others = [dict(lock.packages) if lock is not None else {}]
        # That of a cell whose name it may not take.
        others += [
            dict(sidecar.lock) for sidecar in read_sidecars(layout) if sidecar.id == cell.id and sidecar.state == TESTED
        ]
        needed = {name: version for name, version in stack.items() for other in others if other.get(name) != version}
        # All is as in the stack, or differs though it is pinned, which another pin would not change.
        if not needed.keys() - pins.keys():
            return cell
        # At least one more each time, of the few that a stack has.
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
    tested = (sidecar for sidecar in read_sidecars(layout) if sidecar.state == TESTED)
    return next((sidecar for sidecar in tested if _of_stack(sidecar.lock) == dict(stack)), None)


def _of_stack(packages: Mapping[str, str]) -> dict[str, str]:
    return {package: packages[package] for package in REQUIRED if package in packages}
