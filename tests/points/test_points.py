"""The table of patch points against the sources of every release in the locks; ``nox -s points`` unpacks and runs it.

Nothing is imported: a name counts as there if the module, or the class in it, defines or imports it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_trlcompat.trainers.curing.declared_points import all_points
from pytest_trlcompat.trainers.curing.patching import PatchPoint
from pytest_trlcompat.trainers.curing.points_in_sources import defines

FOLDER = os.environ.get("TRLCOMPAT_RELEASES")
RELEASES = sorted(path.name for path in Path(FOLDER).iterdir() if "==" in path.name) if FOLDER else []
POINTS = [
    pytest.param(point, id=f"{point.where}{point.releases}")
    for point in dict.fromkeys(point for _, point in all_points())
    if point.package != "torch"  # several gigabytes a release; tests/stack look at the installed one
]


def has(release: str, point: PatchPoint) -> bool:
    """Whether the sources of a release define the name."""
    return defines(Path(FOLDER or "", release), point)


@pytest.mark.skipif(not FOLDER, reason="needs the sources of many releases; run: nox -s points")
@pytest.mark.parametrize("point", POINTS)
def test_every_release_in_the_locks_has_what_the_table_says(point: PatchPoint) -> None:
    releases = [name for name in RELEASES if name.startswith(f"{point.package.replace('_', '-')}==")]
    meant = [name for name in releases if point.exists_in(name.rpartition("==")[2])]
    assert releases
    assert meant, f"no release in the locks is in {point.releases}"
    assert [name for name in meant if not has(name, point)] == []


@pytest.mark.skipif(not FOLDER, reason="needs the sources of many releases; run: nox -s points")
def test_a_name_that_no_release_has_is_seen_to_be_missing() -> None:
    (newest,) = [name for name in RELEASES if name.startswith("trl==")][-1:]
    assert not has(newest, PatchPoint("trl.trainer.grpo_trainer:GRPOTrainer.no_such_method"))
    assert not has(newest, PatchPoint("trl.no_such_module:name"))
    assert has(newest, PatchPoint("trl.trainer.grpo_trainer:GRPOTrainer.compute_loss"))
