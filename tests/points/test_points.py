"""The table of patch points against the sources of every release in the locks; ``nox -s points`` unpacks and runs it.

Nothing is imported: a name counts as there if the module, or the class in it, defines or imports it.
"""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_trlcompat.trainers import patch_points
from pytest_trlcompat.trainers._patching import PatchPoint

FOLDER = os.environ.get("TRLCOMPAT_RELEASES")
RELEASES = sorted(path.name for path in Path(FOLDER).iterdir() if "==" in path.name) if FOLDER else []
POINTS = [
    pytest.param(point, id=f"{point.where}{point.releases}")
    for point in dict.fromkeys(point for _, point in patch_points.all_points())
    if point.package != "torch"  # several gigabytes a release; tests/stack look at the installed one
]


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def has(release: str, point: PatchPoint) -> bool:
    """Whether the sources of a release define the name."""
    base = Path(FOLDER or "", release, *point.module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.exists():
            body: list[ast.stmt] = tree(path).body
            for part in point.where.rpartition(":")[2].split("."):
                found = dict(_names(body))
                if part not in found:
                    return False
                body = getattr(found[part], "body", [])
            return True
    return False


def _names(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (((alias.asname or alias.name).split(".")[0], node) for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            for part in ("body", "orelse", "finalbody"):
                yield from _names(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _names(handler.body)


@pytest.mark.skipif(not FOLDER, reason="needs the sources of many releases; run: nox -s points")
@pytest.mark.parametrize("point", POINTS)
def test_every_release_in_the_locks_has_what_the_table_says(point: PatchPoint) -> None:
    releases = [name for name in RELEASES if name.startswith(f"{point.package}==")]
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
