"""What the sources of a new release say by themselves, before anything is trained with them.

Config fields that the table of settings does not know, names that cures change and that are gone, branches for NPUs or
CUDA GPUs alone that nobody has decided about. Nothing of the release is imported.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pytest_trlcompat.accelerator import decision_table, decisions
from pytest_trlcompat.conformance import fields, walk
from pytest_trlcompat.matrix.covering.releases import Release
from pytest_trlcompat.matrix.files import write_whole
from pytest_trlcompat.trainers.curing.declared_points import all_points
from pytest_trlcompat.trainers.curing.patching import PatchPoint
from pytest_trlcompat.trainers.curing.points_in_sources import defines

__all__ = ["keep_remarks", "read_remarks", "remarks"]

_WITH_CONFIGS = ("trl", "transformers")
_UNPLACED = "stands nowhere"


def remarks(release: Release, site_packages: Path) -> list[str]:
    """A line for each thing that this project has to look at.

    Args:
        site_packages: where the release is installed.
    """
    return [
        *_moved_points(release, site_packages),
        *(_unknown_fields(release, site_packages) if release.package in _WITH_CONFIGS else ()),
        *_undecided_branches(release, site_packages),
    ]


def keep_remarks(release: Release, site_packages: Path, path: Path) -> None:
    """Write the remarks into a file, since the environment is removed."""
    write_whole(path, json.dumps(remarks(release, site_packages), indent=1) + "\n")


def read_remarks(path: Path) -> list[str]:
    """What :func:`keep_remarks` wrote; nothing where it did not."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [str(line) for line in raw] if isinstance(raw, list) else []


def _moved_points(release: Release, folder: Path) -> Iterator[str]:
    cures: dict[PatchPoint, list[str]] = {}
    for cure, point in all_points():
        cures.setdefault(point, []).append(cure)
    for point, names in cures.items():
        if point.package == release.package and point.exists_in(release.version) and not defines(folder, point):
            yield f"{point.where} is gone, and cures change it: see _points of {', '.join(names)}"


def _unknown_fields(release: Release, folder: Path) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as temporary:
        unpacked = Path(temporary, f"{release.package}=={release.version}")
        # walk reads release and version from the folder's name, as of one that was unpacked for it.
        unpacked.symlink_to(folder.resolve())
        try:
            problems = walk.problems(walk.config_classes(unpacked), fields.load())
        except walk.WalkError as error:
            yield f"its config fields cannot be read: {error}"
            return
    yield from (line for line in problems if _UNPLACED in line)


def _undecided_branches(release: Release, folder: Path) -> Iterator[str]:
    entries = decision_table.load()
    for package, version, files in decisions.installed([str(folder)]):
        if package == release.package:
            for branch in decisions.scan(package, version, files):
                if decision_table.decide(branch, entries) is None:
                    yield f"nobody has decided about a branch for one kind of accelerator: {branch.describe()}"
