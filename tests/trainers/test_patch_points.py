"""Mixins declare all that they override and change upstream, with the releases that have it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from pytest_trlcompat import trainers
from pytest_trlcompat.trainers.curing import declared_points, patch_points
from pytest_trlcompat.trainers.curing.declared_points import all_points
from pytest_trlcompat.trainers.curing.kinds import KINDS
from pytest_trlcompat.trainers.curing.names import MODULES
from pytest_trlcompat.trainers.curing.patching import PatchPoint

FOLDER = Path(trainers.__file__).parent
OWN = {
    *("__init__", "__init_subclass__", "__setattr__", "_activity", "_around_generation"),
    *("_divided_by_trainer", "_loss_is_divided"),
}
"""What mixins call by super() although it is not upstream's."""
BASES = {"AroundGeneration", "Cure", "ScaledBackward"}
"""What mixins derive from."""


POINTS: dict[str, set[PatchPoint]] = {}
for _mixin, _point in all_points():
    POINTS.setdefault(_mixin, set()).add(_point)


def overriding() -> Iterator[tuple[str, str]]:
    """Each mixin with each method of its own that calls upstream's of the same name."""
    for path in sorted(FOLDER.glob("**/*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and (node.name.endswith("Mixin") or node.name in BASES):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name not in OWN and _calls_itself(method):
                        yield node.name, method.name


def _calls_itself(method: ast.FunctionDef) -> bool:
    """Whether it mentions ``super`` and an attribute of its own name."""
    names = {node.id for node in ast.walk(method) if isinstance(node, ast.Name)}
    attributes = {node.attr for node in ast.walk(method) if isinstance(node, ast.Attribute)}
    return "super" in names and method.name in attributes


OVERRIDING = list(overriding())


def test_there_is_something_to_look_at() -> None:
    assert len(OVERRIDING) > 40
    assert {mixin for mixin, _ in OVERRIDING} - BASES <= set(MODULES)
    assert ("SamplingMixin", "_around_generation") not in OVERRIDING
    assert ("FSDPSaveMixin", "save_model") in OVERRIDING


@pytest.mark.parametrize(("mixin", "method"), OVERRIDING, ids=lambda value: value)
def test_a_mixin_declares_what_it_overrides(mixin: str, method: str) -> None:
    assert method in {point.name for point in POINTS[mixin]}


@pytest.mark.parametrize("module", sorted(set(MODULES.values())))
def test_what_a_module_changes_is_declared_by_a_mixin_of_it(module: str) -> None:
    text = (FOLDER / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    names = re.findall(r"patch_points\.[A-Z0-9_]+\b", text)
    names += re.findall(r"^([A-Z0-9_]+) = \(?\s*(?:PatchPoint|patch_points)\b", text, re.MULTILINE)
    evaluated = declared_points.Names(ast.parse(text))
    declared = {point for name in re.findall(r"^class (\w+)", text, re.MULTILINE) for point in POINTS.get(name, ())}
    for name in names:
        value = evaluated.value_of(ast.parse(name, mode="eval").body)
        assert set(value if isinstance(value, tuple) else (value,)) <= declared, name


def test_points_are_declared_by_mixins_and_by_what_they_derive_from_alone() -> None:
    mixins = {name for name in MODULES if name.endswith("Mixin")}
    assert len(POINTS) > 60
    assert set(POINTS) <= mixins | BASES
    assert set(POINTS) >= BASES
    assert {mixin for names in KINDS.values() for mixin in names} == mixins


def test_points_can_be_read() -> None:
    for mixin, point in all_points():
        assert point.where.count(":") == 1, mixin
        assert point.package in ("trl", "transformers", "accelerate", "deepspeed", "liger_kernel", "peft", "torch")
        SpecifierSet(point.releases)


def test_of_ppos_modules_one_has_it_in_each_release() -> None:
    (old,) = [each for each in POINTS["PPOFSDPMixin"] if "ppov2" in each.where and "reward" in each.where]
    assert old == patch_points.ppo("get_reward", "trl.trainer.ppov2_trainer")
    assert old.exists_in("0.11.4")
    assert not old.exists_in("0.12.0")
