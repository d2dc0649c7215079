"""The patch that a person reviews and applies with ``git apply``: cells, locks, hashes, predictions.

Nothing of the checkout is changed.
"""

from __future__ import annotations

import datetime
import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from pytest_trlcompat.matrix import hashes, locks
from pytest_trlcompat.matrix.cells import FULL_TAG, Matrix
from pytest_trlcompat.matrix.layout import Layout
from pytest_trlcompat.watch.changes import Change
from pytest_trlcompat.watch.editing import Correction, NotCorrected, correct
from pytest_trlcompat.watch.layout import WatchLayout
from pytest_trlcompat.watch.narrowing import Narrowed
from pytest_trlcompat.watch.plan import WatchedCell

__all__ = ["Patch", "make_patch", "unified"]

_MATRIX = "fixtures/matrix.toml"


@dataclass(frozen=True)
class Patch:
    """What a person may apply.

    Attributes:
        text: a unified diff with paths from the root of the checkout; empty where there is nothing to change.
        left_out: a line for each change that a person must write.
    """

    text: str
    left_out: tuple[str, ...] = ()


def make_patch(
    matrix: Matrix,
    layout: WatchLayout,
    tested: Sequence[WatchedCell],
    changes: Sequence[tuple[Change, Narrowed | None]],
) -> Patch:
    """A patch by which the matrix knows the new releases, and the catalogue what was measured of them.

    The newest of all becomes a cell; so does each release alone that changed something, by which its boundary is
    measured on both sides, and each that would otherwise be new again. A prediction is corrected only where a bisection
    has measured the release that changed it.

    Args:
        tested: cells with verdicts.

    Raises:
        MatrixError: when a lock cannot be read, or the index states no hash of a release in one.
    """
    before: dict[str, str] = {}
    after: dict[str, str] = {}
    new = _new_cells(matrix, tested, changes)
    if new:
        before[_MATRIX] = layout.matrix.read_text(encoding="utf-8")
        after[_MATRIX] = "\n".join([before[_MATRIX].rstrip("\n"), *(_entry(watched, why) for watched, why in new)])
        for watched, _ in new:
            lock = locks.lock_for(matrix, watched.cell, layout)
            before[f"fixtures/locks/{watched.cell.id}.txt"] = ""
            after[f"fixtures/locks/{watched.cell.id}.txt"] = lock.to_text()
        _add_hashes(matrix, layout, [watched for watched, _ in new], before, after)
    left_out = _correct(layout, changes, before, after)
    return Patch("".join(unified(path, before[path], after[path]) for path in sorted(after)), tuple(left_out))


def unified(path: str, before: str, after: str) -> str:
    """A file's part of a patch as git reads it; a file without a text before is new."""
    # git apply reads /dev/null as the name of a file that is not there yet.
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    lines = list(difflib.unified_diff(old, new, f"a/{path}" if old else "/dev/null", f"b/{path}"))
    if not lines:
        return ""
    mode = [] if old else ["new file mode 100644\n"]
    return "".join([f"diff --git a/{path} b/{path}\n", *mode, *lines])


def _new_cells(
    matrix: Matrix, tested: Sequence[WatchedCell], changes: Sequence[tuple[Change, Narrowed | None]]
) -> list[tuple[WatchedCell, str]]:
    known = {cell.id for cell in matrix.cells}
    changed = {change.cell.cell.id for change, _ in changes}
    newest = _newest(tested)
    new_cells = []
    for watched in tested:
        if watched.cell.id in known or newest is None:
            continue
        if watched is newest:
            new_cells.append((watched, "the newest release"))
        elif watched.cell.id in changed:
            new_cells.append((watched, f"{watched.release} alone, which changed something"))
        elif _is_new_by_its_day(watched, tested, newest):
            new_cells.append((watched, f"{watched.release} alone, a patch of an older series"))
    return new_cells


def _is_new_by_its_day(watched: WatchedCell, tested: Sequence[WatchedCell], newest: WatchedCell) -> bool:
    """Whether its release would still be new, if the matrix knew the newest of all alone."""
    release = watched.release
    if release is None or Version(release.version) >= Version(newest.stack.get(release.package, release.version)):
        return False
    days = (
        watched_cell.release.day
        for watched_cell in tested
        if watched_cell.release
        and watched_cell.release.package == release.package
        and watched_cell.release.version == newest.stack[release.package]
    )
    return release.day > next(days, datetime.date.min)


def _newest(tested: Sequence[WatchedCell]) -> WatchedCell | None:
    """The newest of all; where one release alone is that, the first, since the plan begins with the newest."""
    everything = [watched for watched in tested if watched.release is None]
    return next(iter([*everything, *tested]), None)


def _entry(watched: WatchedCell, why: str) -> str:
    pins = ", ".join(f"{package} = {json.dumps(version)}" for package, version in watched.cell.pins.items())
    return "\n".join(
        [
            "",
            "[[cell]]",
            f"pins = {{ {pins} }}",
            f"date = {watched.cell.date}",
            f"tags = [{json.dumps(FULL_TAG)}]",
            f"why = {json.dumps(why)}",
            "",
        ]
    )


def _add_hashes(
    matrix: Matrix, layout: WatchLayout, cells: Iterable[WatchedCell], before: dict[str, str], after: dict[str, str]
) -> None:
    releases = {line for watched in cells for line in locks.lock_for(matrix, watched.cell, layout).releases}
    name = ".".join(matrix.python.split(".")[:2])
    path = f"fixtures/hashes/{name}.txt"
    text = (Layout(layout.root).hashes / f"{name}.txt").read_text(encoding="utf-8")
    known = hashes.read(Layout(layout.root).hashes / f"{name}.txt")
    missing = sorted(releases - set(known))
    if missing:
        before[path] = text
        after[path] = hashes.text_of({**known, **hashes.ask(missing, matrix.python, index_alone=True)}, matrix.python)


def _correct(
    layout: WatchLayout,
    changes: Iterable[tuple[Change, Narrowed | None]],
    before: dict[str, str],
    after: dict[str, str],
) -> list[str]:
    left_out = []
    edited: dict[Path, str] = {}
    for change, narrowed in changes:
        try:
            # Each upon the ones before, since two may concern one file.
            edited = correct(layout.catalog, edited, _correction(change, narrowed))
        except NotCorrected as error:
            left_out.append(f"{change.sentence}: {error}")
    for file, text in edited.items():
        path = file.relative_to(layout.root).as_posix()
        before[path], after[path] = file.read_text(encoding="utf-8"), text
    return left_out


def _correction(change: Change, narrowed: Narrowed | None) -> Correction:
    """
    Raises:
        NotCorrected: the boundary was not measured.
    """
    if change.cell.commit is not None:
        raise NotCorrected("a commit is no release: the release that has it will be measured when it is out")
    if narrowed is None or not narrowed.found:
        raise NotCorrected("which release changed it was not measured")
    if narrowed.between:
        raise NotCorrected(f"of {narrowed.between} between {narrowed.before} and {narrowed.after} nothing is known")
    if not narrowed.package:
        raise NotCorrected("no single package changed it")
    versions: Mapping[str, str] = change.cell.stack
    return Correction(
        issue=change.issue,
        subject=change.subject,
        strategies=change.strategies,
        verdict=change.record.verdict,
        by=change.record.blocked_by,
        package=narrowed.package,
        first=narrowed.after,
        versions=versions,
        why=f"measured: {narrowed.before} and {narrowed.after} of {narrowed.package} differ; say why",
    )
